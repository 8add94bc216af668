"""Validate values against a model; errors name the field's path, the given value and the allowed ones."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable, Iterator
from functools import reduce
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from fluxtrain.contract.describe import (
    Node,
    Schema,
    allowed,
    key_schema,
    node_of,
    non_null,
    value_schema,
)
from fluxtrain.contract.strict_model import BrokenRulesError, StrictModel
from fluxtrain.errors import UNSET, ConfigError, JoinedConfigError

Model = TypeVar("Model", bound=StrictModel)


def validate(model: type[Model], values: object, at: str) -> Model:
    """Return ``values`` as ``model``; raise ConfigError naming every wrong field below ``at``.

    A float with an integral value, such as 1e3, is accepted for an integer.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        details = error.errors()
    if integral := [detail["loc"] for detail in details if _is_integral(detail)]:
        return validate(model, _with_integers(values, integral), at)
    raise join_errors(error for detail in details for error in _explain(model, detail, at))


def join_errors(errors: Iterable[ConfigError]) -> ConfigError:
    """Return one error for all of ``errors``: the first of each path, one line each."""
    by_path = {error.path: error for error in reversed(list(errors))}
    kept = list(reversed(by_path.values()))
    return kept[0] if len(kept) == 1 else JoinedConfigError(kept)


def did_you_mean(given: str, names: Iterable[str]) -> str:
    """Return "; did you mean X?" for the name closest to ``given``, or the list of all names."""
    names = list(names)
    return near_miss(given, names) or f"; there are {', '.join(names)}"


def near_miss(given: str, names: Iterable[str]) -> str:
    """Return "; did you mean X?" for the name closest to ``given``, "" if none is close."""
    name = closest(given, names)
    return "" if name is None else f"; did you mean {name}?"


def closest(given: str, names: Iterable[str]) -> str | None:
    """Return the name closest to ``given``, None if none is close."""
    names = sorted(names)
    normalized = {_normalize(name): name for name in names} | {_initials(n): n for n in names}
    matches = [normalized[_normalize(given)]] if _normalize(given) in normalized else []
    matches += difflib.get_close_matches(given, names, n=1, cutoff=0.6)
    return matches[0] if matches else None


def _normalize(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def _initials(name: str) -> str:
    return "".join(word[0] for word in name.split("_") if word) if "_" in name else _normalize(name)


def _is_integral(detail: ErrorDetails) -> bool:
    value = detail["input"]
    return detail["type"] == "int_type" and isinstance(value, float) and value.is_integer()


def _with_integers(values: Any, locations: list[tuple[int | str, ...]]) -> Any:
    """Return a copy of ``values`` with the floats at ``locations`` as integers."""
    values = copy.deepcopy(values)
    for location in locations:
        *above, last = _without_alternative(values, location)
        container = reduce(lambda value, key: value[key], above, values)
        container[last] = int(container[last])
    return values


def _without_alternative(values: Any, location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Return pydantic's ``location`` of a number in ``values`` without the name of an alternative type."""
    *above, _ = location
    number = reduce(lambda value, key: value[key], above, values)
    return location if isinstance(number, (dict, list)) else tuple(above)


def _explain(model: type[StrictModel], detail: ErrorDetails, at: str) -> Iterator[ConfigError]:
    node, path = _resolve(model, detail["loc"], at)
    kind = detail["type"]
    if kind == "value_error":
        error = detail["ctx"]["error"]
        assert isinstance(error, BrokenRulesError), "models have rules, nothing else raises"
        for rule in error.broken:
            value = error.model.look_up(rule.field) if rule.field else UNSET
            yield ConfigError(f"{path}.{rule.field}".strip("."), value, rule.explain(error.model))
    elif kind == "extra_forbidden":
        *above, name = detail["loc"]
        parent, _ = _resolve(model, above, "")
        names = parent.attributes() if isinstance(parent, type) else []
        yield ConfigError(path, UNSET, f"no such field{did_you_mean(str(name), names)}")
    elif kind == "missing":
        yield ConfigError(path, UNSET, f"must be given: {allowed(node)}")
    else:
        yield ConfigError(path, detail["input"], f"must be {allowed(node)}")


def _resolve(model: type[StrictModel], location: Iterable[int | str], at: str) -> tuple[Node, str]:
    """Return the model or schema at pydantic's ``location`` below ``model``, and its path in the file."""
    node: Node = model
    mapping: Schema = {}
    key: int | str = ""
    path = at
    for part in location:
        if part == "[key]":  # the key itself is wrong: the error names the mapping
            return key_schema(mapping), path.removesuffix(f".{key}")
        if isinstance(node, type):
            path = f"{path}.{part}".strip(".")
            attribute = node.attributes().get(str(part))
            if attribute is None:
                break
            node = node_of(node.model_fields[attribute])
        elif isinstance(part, int):
            path = f"{path}[{part}]"
            listed = non_null(node)
            node = listed.get("items") or listed.get("prefixItems", [{}])[0]
        elif non_null(node).get("type") == "object":
            path = f"{path}.{part}"
            mapping, key = non_null(node), part
            node = value_schema(mapping) or mapping
    return node, path
