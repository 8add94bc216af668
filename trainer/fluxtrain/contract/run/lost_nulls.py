"""Nulls of ``spec.run`` that `kubectl apply` would drop, so that a file would mean something else there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.immutable_fields import value_at
from fluxtrain.contract.run.resolve import with_preset
from fluxtrain.contract.validation import validate
from fluxtrain.errors import UNSET, ConfigError, in_yaml_words

_NONE = {"data.validation", "preprocess.train", "preprocess.validation"}
"""Fields that take the word none."""


def require_no_lost_nulls(run: Mapping[str, Any], at: str = "spec.run") -> None:
    """Raise ConfigError if a field of the valid ``run`` is null but would have a value without it.

    kubectl and other clients drop nulls, and the API server those of fields that are not nullable: what is
    left is the value of the preset, or the default.
    """
    paths = list(_nulls(run, ()))
    if not paths:
        return
    kept = validate(RunConfig, with_preset(_without_nulls(run)), at).model_dump(mode="json")
    for path in paths:
        name = ".".join(path)
        if (value := value_at(kept, name)) is not None:
            advice = "write none" if name in _NONE else "give a value"
            text = f"null is dropped by kubectl apply, and {in_yaml_words(value)} would remain; {advice}"
            raise ConfigError(f"{at}.{name}", UNSET, text)


def _nulls(values: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        path = (*above, str(key))
        if value is None:
            yield path
        elif isinstance(value, Mapping):
            yield from _nulls(value, path)


def _without_nulls(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {key: _without_nulls(below) for key, below in value.items() if below is not None}
