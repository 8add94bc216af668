"""Resolve ``spec.run``, a preset and overrides, to a complete RunConfig."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from fluxtrain.contract.model_base import validate
from fluxtrain.contract.run import closed_division
from fluxtrain.contract.run.adapter import AdapterConfig, LayerName, kind_of, selected_blocks
from fluxtrain.contract.run.closed_division import require_schedule, schedule_values
from fluxtrain.contract.run.config import AUTO, RunConfig, value_at
from fluxtrain.contract.run.data import BucketsConfig, without_decided
from fluxtrain.contract.run.model import CONDITIONS, ModelConfig
from fluxtrain.contract.run.presets import PRESETS
from fluxtrain.errors import UNSET, ConfigError, in_yaml_words


def resolve(run: Mapping[str, Any]) -> RunConfig:
    """Return the preset of ``run``, overridden by its other fields.

    The presets ``mlperf-*`` have the learning rate and the warm-up of MLCommons' reference at the batch size.

    Raises ConfigError with the paths of all fields that are wrong.
    """
    config = validate(RunConfig, with_preset(run), "spec.run")
    closed_division.require_allowed(config)
    require_schedule(run, config)
    if config.parallel.micro_batch_size == AUTO and config.task != "train":
        text = "must be a number unless task is train, which finds one"
        raise ConfigError("spec.run.parallel.micro_batch_size", AUTO, text)
    require_adaptable(config)
    require_buckets(config)
    require_data(config)
    return config


def with_preset(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the preset of ``run``, overridden by its own fields; none is validated."""
    preset = run.get("preset")
    base = PRESETS.get(preset, {}) if isinstance(preset, str) else {}
    model = run.get("model")
    condition = str(model.get("condition")) if isinstance(model, Mapping) else ""
    if "initial_weights" in base and condition in CONDITIONS:
        base = {**base, "initial_weights": CONDITIONS[condition].weights}
    return merge(merge(base, schedule_values(run)), run)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` overridden by ``over``; mappings are merged, other values replaced.

    Of ``image_size`` and ``latent_size`` the one that ``over`` has replaces both; ``steps`` replace epochs.
    """
    merged = without_decided(base, over)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            merged[key] = merge(below, value)
        else:
            merged[key] = value
    return merged


_NONE = {"data.validation", "preprocess.train", "preprocess.validation"}
"""Fields that take the word none."""


def require_no_lost_nulls(run: Mapping[str, Any]) -> None:
    """Raise ConfigError if a field of the valid ``run`` is null but would have a value without it.

    kubectl and other clients drop nulls, and the API server those of fields that are not nullable: what is
    left is the value of the preset, or the default.
    """
    paths = list(_nulls(run, ()))
    if not paths:
        return
    kept = validate(RunConfig, with_preset(without_nulls(run)), "spec.run").model_dump(mode="json")
    for path in paths:
        name = ".".join(path)
        if (value := value_at(kept, name)) is not None:
            advice = "write none" if name in _NONE else "give a value"
            text = f"null is dropped by kubectl apply, and {in_yaml_words(value)} would remain; {advice}"
            raise ConfigError(f"spec.run.{name}", UNSET, text)


def _nulls(values: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        path = (*above, str(key))
        if value is None:
            yield path
        elif isinstance(value, Mapping):
            yield from _nulls(value, path)


def without_nulls(value: Any) -> Any:
    """Return ``value`` without the fields of mappings that are null."""
    if not isinstance(value, Mapping):
        return value
    return {key: without_nulls(below) for key, below in value.items() if below is not None}


def require_data(config: RunConfig) -> None:
    """Raise ConfigError if ``config`` asks for what its data cannot give."""
    data = config.data
    if data.images is not None and config.task not in ("train", "evaluate"):
        text = "must be null unless task is train, which encodes the pictures"
        if config.task == "benchmark":
            text = "must be null if task is benchmark: set data.source to synthetic, with the same sizes"
        raise ConfigError("spec.run.data.images", data.images, text)
    if data.validation_split:
        _require_split(config)
    elif data.validation is None:
        _require_no_validation(config)


def _require_split(config: RunConfig) -> None:
    field = "spec.run.data.validation_split"
    if config.data.validation is not None:
        text = "must be none if validation_split is set, which holds pictures out"
        raise ConfigError("spec.run.data.validation", config.data.validation, text)
    if config.task != "train":
        raise ConfigError(field, config.data.validation_split, "must be 0 unless task is train")
    if not config.evaluation.is_on:
        text = "needs an evaluation: set evaluation.every_samples, at_start or at_end"
        raise ConfigError(field, config.data.validation_split, text)


def _require_no_validation(config: RunConfig) -> None:
    field, evaluation, sampling = "spec.run.data.validation", config.evaluation, config.sampling
    if config.task in ("prepare", "evaluate"):
        raise ConfigError(field, UNSET, f"must name a folder if task is {config.task}")
    if config.task == "train" and evaluation.is_on:
        text = "must name a folder, or set evaluation.every_samples to 0"
        raise ConfigError(field, UNSET, text)
    samples = sampling.every_steps > 0 or sampling.at_end
    has_prompts = sampling.prompts or sampling.prompt_file is not None
    if config.task == "train" and samples and not has_prompts:
        text = "must hold a prompt: there is no validation set whose prompts could be sampled"
        raise ConfigError("spec.run.sampling.prompts", UNSET, text)


def require_buckets(config: RunConfig) -> None:
    """Raise ConfigError if ``config`` has buckets that it cannot train on."""
    data, buckets = config.data, config.data.buckets
    if buckets is None:
        return
    if data.source == "images":
        text = (
            "must be encoded or synthetic with data.buckets: the sizes of other images are known once "
            "all are read; name their folder in data.images, which encodes them before the first step"
        )
        raise ConfigError("spec.run.data.source", data.source, text)
    swept = config.benchmark.image_sizes if config.task == "benchmark" else []
    if buckets.resolutions and swept:
        text = "must be empty if data.buckets has resolutions, which are the sizes"
        raise ConfigError("spec.run.benchmark.image_sizes", swept, text)
    if not buckets.resolutions:
        _require_side(buckets, data.image_size, "spec.run.data.image_size")
        for number, side in enumerate(swept):
            _require_side(buckets, side, f"spec.run.benchmark.image_sizes[{number}]")


def _require_side(buckets: BucketsConfig, side: int, path: str) -> None:
    lowest = max(buckets.step, buckets.min_side or 0)
    if not lowest <= side <= (buckets.max_side or side):
        text = (
            "must be neither below step or min_side of data.buckets nor above its max_side, "
            "if it has no resolutions"
        )
        raise ConfigError(path, side, text)


_TASKS = ("train", "benchmark")


def require_adaptable(config: RunConfig) -> None:
    """Raise ConfigError if ``config`` has adapters that cannot be trained."""
    if config.adapter is None:
        return
    if config.task not in _TASKS:
        text = f"must be one of {', '.join(_TASKS)} if adapter is set: it trains"
        raise ConfigError("spec.run.task", config.task, text)
    if config.precision.fp8 != "none":
        text = "must be none if adapter is set: frozen weights are not computed in fp8 yet"
        raise ConfigError("spec.run.precision.fp8", config.precision.fp8, text)
    if config.task == "train" and config.initial_weights is None:
        text = "must name the weights that the adapters change"
        raise ConfigError("spec.run.initial_weights", UNSET, text)
    if config.adapter.kind != "lora":
        _require_for_products(config, config.adapter)
    if config.adapter.dora and config.adapter_file.layout == "ai-toolkit":
        text = (
            "must be kohya, diffusers or bfl if adapter.dora is on: it has no name for magnitudes"
        )
        raise ConfigError("spec.run.adapter_file.layout", config.adapter_file.layout, text)
    one_step_size = f"if optim.name is {config.optim.name}: it finds one step size for all"
    if config.optim.kind.finds_step_size and not config.adapter.rates.is_one:
        given = config.adapter.rates.model_dump(exclude_defaults=True)
        raise ConfigError("spec.run.adapter.rates", given, f"must be left out {one_step_size}")
    clip = config.adapter.clip
    if config.optim.kind.finds_step_size and clip is not None and not clip.is_one:
        field = "up" if clip.rate == 1 else "rate"
        value = getattr(clip, field)
        raise ConfigError(f"spec.run.adapter.clip.{field}", value, f"must be 1 {one_step_size}")
    if clip is not None and config.data.validation is not None:
        text = "must be none if adapter.clip is set: its pooled vectors are of CLIP as it was; use "
        text += "data.validation_split"
        raise ConfigError("spec.run.data.validation", config.data.validation, text)
    _require_layers(config.adapter, config.model)


def _require_for_products(config: RunConfig, adapter: AdapterConfig) -> None:
    layout = config.adapter_file.layout
    if layout not in ("kohya", "bfl"):
        text = f"must be kohya or bfl if adapter.kind is {adapter.kind}: "
        text += "the others have no place for products"
        raise ConfigError("spec.run.adapter_file.layout", layout, text)
    if adapter.rates.up != 1:
        text = f"must be 1 if adapter.kind is {adapter.kind}: it has no matrices B"
        raise ConfigError("spec.run.adapter.rates.up", adapter.rates.up, text)


def _require_layers(adapter: AdapterConfig, model: ModelConfig) -> None:
    """Raise ConfigError unless ``adapter`` selects blocks of ``model``, and some of their layers."""
    num_layers, present = 0, set[str]()
    for field, count in model.depths.items():
        text = getattr(adapter, field)
        try:
            num_blocks = len(selected_blocks(text, count))
        except ValueError as error:
            raise ConfigError(f"spec.run.adapter.{field}", text, str(error)) from None
        names = [
            name
            for name in get_args(LayerName)
            if kind_of(name).startswith("single") == field.startswith("single")
        ]
        num_layers += num_blocks * sum(map(adapter.has_layer, names))
        present.update(name for name in names if num_blocks and adapter.rank_of(kind_of(name)))
    if num_layers == 0:
        given = adapter.model_dump(include={"ranks", "layers", *model.depths}, exclude_none=True)
        raise ConfigError("spec.run.adapter", given, "must leave at least one layer an adapter")
    for number, name in enumerate(adapter.layers):
        if name not in present:
            text = "must be a layer of the selected blocks whose kind has a rank: it would have no effect"
            raise ConfigError(f"spec.run.adapter.layers[{number}]", name, text)
