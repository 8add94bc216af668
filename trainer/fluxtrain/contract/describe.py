"""What a field may hold, in words: the same words in errors, in ``--help`` and in the reference pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from pydantic import ConfigDict, TypeAdapter
from pydantic.fields import FieldInfo

from fluxtrain.contract.section import Fixed, Section

Schema = dict[str, Any]
_WHOLE = {"integer": "a whole number", "number": "a number", "boolean": "true or false"}


@dataclass(frozen=True)
class Facts:
    """What is known of one field that is not itself a group of fields."""

    path: str
    """Names from the top, as the file writes them: ``optim.learning_rate``."""
    allowed: str
    """What it may hold."""
    default: Any
    """The schema's default; pydantic's PydanticUndefined where there is none."""
    sentence: str
    """The docstring under the field."""
    fixed: bool
    """Whether it stays as it was created."""


def walk(model: type[Section], path: str = "", fixed: bool = False) -> Iterator[Facts]:
    """Yield the facts of every field of ``model`` and of the sections below it, in order."""
    for name, field in model.model_fields.items():
        at = f"{path}{field.alias or name}"
        stays = fixed or is_fixed(field)
        below = section_of(field.annotation)
        if below is not None:
            listed = "[]" if is_list(field) else ""
            yield from walk(below, f"{at}{listed}.", stays)
        else:
            sentence = " ".join((field.description or "").split())
            yield Facts(at, allowed(leaf_schema(field)), field.get_default(), sentence, stays)


def is_fixed(field: FieldInfo) -> bool:
    """Return whether ``field`` is marked FIXED."""
    return any(isinstance(mark, Fixed) for mark in field.metadata)


def section_of(annotation: Any) -> type[Section] | None:
    """Return the section that ``annotation`` is, may be (``X | None``) or lists; None for a plain field."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    found = (section_of(argument) for argument in get_args(annotation))
    return next((section for section in found if section is not None), None)


def leaf_schema(field: FieldInfo) -> Schema:
    """Return the JSON schema of ``field`` alone, with its bounds."""
    kind: Any = Annotated[(field.annotation, None, *field.metadata)]
    section = section_of(field.annotation) is not None  # a section brings its own settings
    adapter = TypeAdapter(kind) if section else TypeAdapter(kind, config=ConfigDict(strict=True))
    return {**adapter.json_schema(), **({"title": field.title} if field.title else {})}


def is_list(field: FieldInfo) -> bool:
    """Return whether ``field`` holds a list, or may hold none."""
    return given(leaf_schema(field)).get("type") == "array"


def given(schema: Schema) -> Schema:
    """Return what ``schema`` admits beside null, where that is one thing."""
    options = [option for option in schema.get("anyOf", []) if option.get("type") != "null"]
    return options[0] if len(options) == 1 else schema


def allowed(schema: Schema) -> str:
    """Return in words what ``schema`` admits, such as "a whole number from 1 to 64"."""
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
    return f"{_WHOLE.get(kind, kind)}{_range(schema)}"


def value_schema(schema: Schema) -> Schema | None:
    """Return the schema of the values of a mapping, None where they may be anything."""
    patterns = iter(schema.get("patternProperties", {}).values())
    values = schema.get("additionalProperties") or next(patterns, None)
    return values if isinstance(values, dict) else None


def key_schema(schema: Schema) -> Schema:
    """Return the schema of the keys of a mapping."""
    pattern = next(iter(schema.get("patternProperties", {})), None)
    found = {"type": "string", **schema.get("propertyNames", {})}
    return found if pattern is None else {**found, "pattern": pattern}


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
