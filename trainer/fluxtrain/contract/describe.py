"""Descriptions of fields and of their allowed values, for errors, ``--help-fields`` and the API server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from fluxtrain.contract.strict_model import Immutable, StrictModel

Schema = dict[str, Any]
Node = type[StrictModel] | Schema
"""A model, or the JSON schema of a field that is none; the items of a list may be a model."""
_TYPES = {"integer": "a whole number", "number": "a number", "boolean": "true or false"}


@dataclass(frozen=True)
class FieldDoc:
    """Documentation of one field that is not a model itself."""

    path: str
    """Path in the file, such as ``optim.learning_rate``."""
    immutable: bool
    """Whether it cannot change while the job exists."""
    info: FieldInfo
    """Pydantic's description."""

    @property
    def allowed(self) -> str:
        """Return the allowed values, in words."""
        return allowed(node_of(self.info))

    @property
    def description(self) -> str:
        """Return the docstring under the field."""
        return " ".join((self.info.description or "").split())


def iter_fields(
    model: type[StrictModel], path: str = "", immutable: bool = False
) -> Iterator[FieldDoc]:
    """Yield the documentation of every field of ``model`` and of the models below it, in order."""
    for name, field in model.model_fields.items():
        at = f"{path}{field.alias or name}"
        fixed = immutable or any(isinstance(mark, Immutable) for mark in field.metadata)
        below = model_of(field.annotation)
        if below is None:
            yield FieldDoc(at, fixed, field)
        else:
            listed = "[]" if is_list(field.annotation) else ""
            yield from iter_fields(below, f"{at}{listed}.", fixed)


def model_of(annotation: Any) -> type[StrictModel] | None:
    """Return the model in ``annotation``: ``X``, ``X | None`` or ``list[X]``; None if there is none."""
    if isinstance(annotation, type) and issubclass(annotation, StrictModel):
        return annotation
    models = (model_of(argument) for argument in get_args(annotation))
    return next((model for model in models if model is not None), None)


def is_list(annotation: Any) -> bool:
    """Return whether ``annotation`` is a list or an optional list."""
    return get_origin(annotation) is list or any(map(is_list, get_args(annotation)))


def node_of(field: FieldInfo) -> Node:
    """Return the model of ``field``, or its JSON schema with its bounds."""
    below = model_of(field.annotation)
    if below is not None and not is_list(field.annotation):
        return below
    kind: Any = Annotated[(field.annotation, None, *field.metadata)]
    schema = TypeAdapter(kind).json_schema()
    if below is not None:
        non_null(schema)["items"] = below
    return {**schema, **({"title": field.title} if field.title else {})}


def non_null(schema: Schema) -> Schema:
    """Return the one alternative of ``schema`` beside null, or ``schema`` if there is no single one."""
    options = [option for option in schema.get("anyOf", []) if option.get("type") != "null"]
    return options[0] if len(options) == 1 else schema


def allowed(schema: Node) -> str:
    """Return the values that ``schema`` allows, in words, such as "a whole number from 1 to 64"."""
    if isinstance(schema, type):
        return f"a mapping with some of {', '.join(schema.attributes())}"
    if "anyOf" in schema:
        return " or ".join(allowed(option) for option in schema["anyOf"])
    if "enum" in schema:
        return f"one of {', '.join(str(value) for value in schema['enum'])}"
    if "const" in schema:
        return str(schema["const"])
    kind = schema.get("type", "")
    if kind == "string":
        return schema.get("title") or _text(schema)
    if kind == "array":
        items = schema.get("items") or schema["prefixItems"][0]
        return f"a list{_between(schema, 'Items', ' entries')}, each {allowed(items)}"
    if kind == "object":
        return _mapping(schema)
    return f"{_TYPES.get(kind, kind)}{_range(schema)}"


def value_schema(schema: Schema) -> Schema | None:
    """Return the schema of the values of a mapping, None if they are not restricted."""
    patterns = iter(schema.get("patternProperties", {}).values())
    values = schema.get("additionalProperties") or next(patterns, None)
    return values if isinstance(values, dict) else None


def key_schema(schema: Schema) -> Schema:
    """Return the schema of the keys of a mapping."""
    pattern = next(iter(schema.get("patternProperties", {})), None)
    keys = {"type": "string", **schema.get("propertyNames", {})}
    return keys if pattern is None else {**keys, "pattern": pattern}


def _text(schema: Schema) -> str:
    form = f" like {schema['pattern']}" if "pattern" in schema else ""
    return f"text{_between(schema, 'Length', ' characters')}{form}"


def _mapping(schema: Schema) -> str:
    values = value_schema(schema)
    if values is None:
        return "a mapping"
    return f"a mapping{_between(schema, 'Properties', ' entries')}, each {allowed(values)}"


def _between(schema: Schema, what: str, unit: str) -> str:
    least, most = schema.get(f"min{what}", 0), schema.get(f"max{what}")
    if most is None:
        return ""
    if least == most:
        return f" of {most}{unit}"
    return f" of {least} to {most}{unit}" if least else f" of at most {most}{unit}"


def _range(schema: Schema) -> str:
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    if low is not None and high is not None:
        text = f" from {_number(low)} to {_number(high)}"
    else:
        parts = [("at least", low), ("above", above), ("at most", high), ("below", below)]
        text = " and".join(f" {word} {_number(n)}" for word, n in parts if n is not None)
    return f"{text}, a multiple of {schema['multipleOf']}" if "multipleOf" in schema else text


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else re.sub(r"e\+?(-?)0*", r"e\1", f"{value:g}")
