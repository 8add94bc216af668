"""From a pydantic model to the structural OpenAPI schema that a CustomResourceDefinition needs."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from fluxtrain.contract.describe import allowed, key_schema, value_schema

Schema = dict[str, Any]

_KEPT = (
    "type", "enum", "pattern", "minLength", "maxLength", "minimum", "maximum", "minItems", "maxItems",
    "multipleOf", "description",
)  # fmt: skip
_ANY_OBJECT = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def structural(model: type[BaseModel], defaults: bool) -> Schema:
    """Return the structural schema of ``model``, with references resolved.

    Without ``defaults`` all fields are optional, and their descriptions name the model's defaults.
    """
    schema = model.model_json_schema(by_alias=True)
    return _convert(schema, schema.get("$defs", {}), defaults)


def _convert(schema: Schema, definitions: dict[str, Schema], defaults: bool) -> Schema:
    schema = _resolved(schema, definitions)
    if "anyOf" in schema:
        return _alternatives(schema, definitions, defaults)
    result = {key: schema[key] for key in _KEPT if key in schema}
    if "x-kubernetes-int-or-string" in schema:
        del result["type"]
        result["x-kubernetes-int-or-string"] = True
    if "const" in schema:
        result["enum"] = [schema["const"]]
    _bounds(schema, result)
    if "prefixItems" in schema or "items" in schema:
        items = schema["prefixItems"][0] if "prefixItems" in schema else schema["items"]
        result["items"] = _convert(items, definitions, defaults)
    if schema.get("type") == "object":
        result |= _object(schema, definitions, defaults)
    if defaults and schema.get("default") is not None:
        result["default"] = _without_nulls(schema["default"])
    elif not defaults and "default" in schema and schema.get("type") != "object":
        result["description"] = (
            f"{result.get('description', '')} Default: {_as_text(schema['default'])}.".strip()
        )
    return result


def _resolved(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    reference = schema.get("$ref")
    if reference is None:
        return schema
    beside = {key: value for key, value in schema.items() if key != "$ref"}
    return {**definitions[reference.rpartition("/")[2]], **beside}


def _alternatives(schema: Schema, definitions: dict[str, Schema], defaults: bool) -> Schema:
    """Return the schema of ``X | None``, or of an integer or a word."""
    one, *others = [option for option in schema["anyOf"] if option.get("type") != "null"]
    beside = {key: value for key, value in schema.items() if key != "anyOf"}
    if others:
        (word,) = others
        bounds = {key: one[key] for key in ("minimum", "maximum")}
        pattern = f"^{word['const']}$"
        field = _convert({**bounds, "pattern": pattern, **beside}, definitions, defaults)
        return {**field, "x-kubernetes-int-or-string": True}
    if beside.get("default") is None:
        beside.pop("default", None)
    return {
        **_convert({**_resolved(one, definitions), **beside}, definitions, defaults),
        "nullable": True,
    }


def _bounds(schema: Schema, result: Schema) -> None:
    for bound, inclusive in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if bound in schema:  # a flag in OpenAPI 3.0
            result[inclusive], result[bound] = schema[bound], True
    if schema.get("type") == "integer":
        result["format"] = "int64"


def _object(schema: Schema, definitions: dict[str, Schema], defaults: bool) -> Schema:
    if "properties" not in schema:
        return _mapping(schema, definitions, defaults)
    result: Schema = {
        "properties": {
            name: _convert(below, definitions, defaults)
            for name, below in schema["properties"].items()
        }
    }
    if schema.get("additionalProperties"):
        result |= _ANY_OBJECT
    if defaults and schema.get("required"):
        result["required"] = schema["required"]
    return result


def _mapping(schema: Schema, definitions: dict[str, Schema], defaults: bool) -> Schema:
    values = value_schema(schema)
    if values is None:
        return _ANY_OBJECT
    result: Schema = {"additionalProperties": _convert(values, definitions, defaults)}
    if "maxProperties" in schema:
        result["maxProperties"] = schema["maxProperties"]
    keys = key_schema(schema)
    if "pattern" in keys:  # OpenAPI cannot constrain keys
        rule = (
            f"self.all(key, key.size() <= {keys['maxLength']} && key.matches('{keys['pattern']}'))"
        )
        result["x-kubernetes-validations"] = [
            {"rule": rule, "message": f"every key must be {allowed(keys)}"}
        ]
    return result


def _without_nulls(default: Any) -> Any:
    """Return ``default`` without null values, which the API server would store."""
    if not isinstance(default, dict):
        return default
    return {key: _without_nulls(value) for key, value in default.items() if value is not None}


def _as_text(value: object) -> str:
    return (
        "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )
