"""From a partial ``spec.run`` to the one RunConfig that runs, or errors that name the fields."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fluxtrain.contract.config import PRESETS, RunConfig
from fluxtrain.contract.presets import PRESET_VALUES
from fluxtrain.errors import UNSTATED, ConfigError, JoinedConfigError

Model = TypeVar("Model", bound=BaseModel)

NOT_YET: dict[tuple[str, object], str] = {
    ("preset", "mlperf-schnell-raw"): "training from raw images",
    ("preset", "dev-finetune"): "starting from published weights",
    ("preset", "dev-lora"): "training LoRA adapters",
    ("preset", "benchmark"): "the benchmark task",
    ("task", "preprocess"): "the preprocess task",
    ("task", "benchmark"): "the benchmark task",
    ("task", "evaluate"): "the evaluate task",
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
        given = "nothing" if preset is None else preset
        raise ConfigError(f"{at}.preset", given, f"allowed: {', '.join(PRESETS)}")
    _refuse_not_yet(run, at)
    config = validate(RunConfig, merge(PRESET_VALUES[preset], run), at)
    _refuse_not_yet(config.model_dump(), at)
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


def validate(model: type[Model], values: object, at: str) -> Model:
    """Return ``values`` as ``model``; raise ConfigError naming every field that is wrong."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        found = [_config_error(model, detail, at) for detail in error.errors()]
    raise found[0] if len(found) == 1 else JoinedConfigError(found)


def _config_error(model: type[BaseModel], detail: ErrorDetails, at: str) -> ConfigError:
    path = ".".join([at, *(str(part) for part in detail["loc"])]).strip(".")
    if detail["type"] == "extra_forbidden":
        names = _names_at(model, detail["loc"][:-1])
        return ConfigError(
            path, detail["input"], f"no such field{did_you_mean(detail['loc'][-1], names)}"
        )
    if detail["type"] == "missing":
        return ConfigError(path, UNSTATED, "missing; this field must be given")
    if detail["type"] == "value_error":
        return ConfigError(path, UNSTATED, detail["msg"].removeprefix("Value error, "))
    return ConfigError(path, detail["input"], detail["msg"].removeprefix("Input "))


def did_you_mean(given: object, names: Iterable[str]) -> str:
    """Return "; did you mean X?" for the name closest to ``given``, or what there is to choose from."""
    names = sorted(names)
    close = difflib.get_close_matches(str(given), names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; allowed: {', '.join(names)}"


def _names_at(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    for part in location:
        below = [
            _model_in(field.annotation)
            for name, field in model.model_fields.items()
            if part in (name, field.alias)
        ]
        model = next((found for found in below if found is not None), model)
    return [field.alias or name for name, field in model.model_fields.items()]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is not None:
        found = (_model_in(argument) for argument in typing.get_args(annotation))
        return next((model for model in found if model is not None), None)
    return None


def _refuse_not_yet(run: Mapping[str, Any], at: str) -> None:
    for (path, value), feature in NOT_YET.items():
        current: Any = run
        for part in path.split("."):
            current = current.get(part) if isinstance(current, Mapping) else None
        if current == value:
            raise ConfigError(f"{at}.{path}", value, f"not yet: {feature} comes later")
    if run.get("adapter") is not None:
        raise ConfigError(f"{at}.adapter", run["adapter"], "not yet: training adapters comes later")
