"""From a partial ``spec.run`` to the one RunConfig that will run, or an error that names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from fluxtrain.contract.config import PRESETS, RunConfig
from fluxtrain.contract.presets import PRESET_VALUES
from fluxtrain.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)

NOT_YET: dict[tuple[str, object], str] = {
    ("preset", "mlperf-schnell-raw"): "training from raw images with T5 and CLIP",
    ("preset", "dev-finetune"): "starting from published weights",
    ("preset", "dev-lora"): "LoRA adapters",
    ("preset", "benchmark"): "the benchmark task",
    ("task", "preprocess"): "the preprocess task",
    ("task", "benchmark"): "the benchmark task",
    ("task", "sample"): "the sample task",
    ("data.source", "images"): "training from raw images",
}
"""Values that the schema knows and this version refuses, each with the feature that it waits for."""


def resolve(run: Mapping[str, Any], at: str = "spec.run") -> RunConfig:
    """Return the complete configuration of ``run``: its preset, changed by its own fields.

    Raises ConfigError with the field's path below ``at`` for anything wrong or not yet built.
    """
    preset = run.get("preset")
    if preset not in PRESETS:
        raise ConfigError(f"{at}.preset", preset, f"allowed: {', '.join(PRESETS)}")
    if (feature := NOT_YET.get(("preset", preset))) is not None:
        raise ConfigError(f"{at}.preset", preset, f"not yet: {feature} comes with a later version")
    config = validate(RunConfig, merge(PRESET_VALUES[preset], run), at)
    _refuse_not_yet(config, at)
    return config


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with the values of ``over``; sections are merged, everything else replaced."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            merged[key] = merge(below, value)
        else:
            merged[key] = value
    return merged


def validate(model: type[Model], values: Mapping[str, Any], at: str) -> Model:
    """Return ``values`` as ``model``; raise ConfigError for the first field that is wrong."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join([at, *(str(part) for part in first["loc"])]).strip(".")
        raise ConfigError(path, first["input"], _allowed(first["type"], first["msg"])) from None


def _allowed(kind: str, message: str) -> str:
    if kind == "extra_forbidden":
        return "no such field"
    return message.removeprefix("Value error, ").removeprefix("Input ")


def _refuse_not_yet(config: RunConfig, at: str) -> None:
    for (path, value), feature in NOT_YET.items():
        current: Any = config
        for part in path.split("."):
            current = getattr(current, part)
        if current == value:
            raise ConfigError(
                f"{at}.{path}", value, f"not yet: {feature} comes with a later version"
            )
    if config.adapter is not None:
        raise ConfigError(
            f"{at}.adapter", "lora", "not yet: LoRA adapters come with a later version"
        )
