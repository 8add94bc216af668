"""Resolve ``spec.run``, a preset and overrides, to a complete RunConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxtrain.contract.run import closed_division
from fluxtrain.contract.run.adapted_run import require_adaptable
from fluxtrain.contract.run.bucket_run import require_buckets
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.needed_data import require_data
from fluxtrain.contract.run.presets import PRESETS
from fluxtrain.contract.run.reference_schedule import require_schedule, schedule_values
from fluxtrain.contract.run.sides import without_decided
from fluxtrain.contract.validation import validate


def resolve(run: Mapping[str, Any], at: str = "spec.run") -> RunConfig:
    """Return the preset of ``run``, overridden by its other fields.

    The presets ``mlperf-*`` have the learning rate and the warm-up of MLCommons' reference at the batch size.

    Raises ConfigError with the paths, below ``at``, of all fields that are wrong.
    """
    config = validate(RunConfig, with_preset(run), at)
    closed_division.require_allowed(config, at)
    require_schedule(run, config, at)
    require_adaptable(config, at)
    require_buckets(config, at)
    require_data(config, at)
    return config


def with_preset(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the preset of ``run``, overridden by its own fields; none is validated."""
    preset = run.get("preset")
    base = PRESETS.get(preset, {}) if isinstance(preset, str) else {}
    return merge(merge(base, schedule_values(run)), run)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` overridden by ``over``; mappings are merged, other values replaced.

    Of ``image_size`` and ``latent_size`` the one that ``over`` has replaces both.
    """
    merged = without_decided(base, over)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            merged[key] = merge(below, value)
        else:
            merged[key] = value
    return merged
