"""From a partial ``spec.run`` to the one RunConfig that runs, or errors that name the fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxtrain.contract.run import closed_division
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.fixed_fields import value_at
from fluxtrain.contract.run.presets import PRESET_VALUES
from fluxtrain.contract.validation import validate
from fluxtrain.errors import ConfigError

ANYTHING = object()
"""Stands for every value of a field but none."""
NOT_YET: dict[tuple[str, object], str] = {
    ("preset", "dev-lora"): "training LoRA adapters",
    ("preset", "benchmark"): "the benchmark task",
    ("task", "benchmark"): "the benchmark task",
    ("task", "evaluate"): "the evaluate task",
    ("adapter", ANYTHING): "training LoRA adapters",
}
"""Values that the schema knows and this version refuses, each with the feature that it waits for."""


def resolve(run: Mapping[str, Any], at: str = "spec.run") -> RunConfig:
    """Return the complete configuration of ``run``: its preset, changed by its own fields.

    Raises ConfigError with the paths, below ``at``, of all that is wrong or not yet built.
    """
    _refuse_not_yet(run, at)
    preset = run.get("preset")
    base = PRESET_VALUES.get(preset, {}) if isinstance(preset, str) else {}
    config = validate(RunConfig, merge(base, run), at)
    closed_division.require_allowed(config, at)
    return config


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with the values of ``over``; sections are merged, all else is replaced."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            merged[key] = merge(below, value)
        else:
            merged[key] = value
    return merged


def _refuse_not_yet(run: Mapping[str, Any], at: str) -> None:
    for (path, refused), feature in NOT_YET.items():
        given = value_at(run, path)
        if given is not None and refused in (given, ANYTHING):
            raise ConfigError(f"{at}.{path}", given, f"not yet: {feature} comes in a later version")
