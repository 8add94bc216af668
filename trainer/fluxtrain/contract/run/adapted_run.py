"""What a run with adapters needs of its other fields: errors before anything is loaded."""

from __future__ import annotations

from typing import get_args

from fluxtrain.contract.run.adapter import AdapterConfig, LayerName, kind_of, selected_blocks
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.errors import UNSET, ConfigError

_TASKS = ("train", "benchmark")


def require_adaptable(config: RunConfig, at: str) -> None:
    """Raise ConfigError, with the path below ``at``, if ``config`` has adapters that cannot be trained."""
    if config.adapter is None:
        return
    if config.task not in _TASKS:
        text = f"must be one of {', '.join(_TASKS)} if adapter is set: it trains"
        raise ConfigError(f"{at}.task", config.task, text)
    if config.precision.fp8 != "none":
        text = "must be none if adapter is set: frozen weights are not computed in fp8 yet"
        raise ConfigError(f"{at}.precision.fp8", config.precision.fp8, text)
    if config.task == "train" and config.initial_weights is None:
        text = "must name the weights that the adapters change"
        raise ConfigError(f"{at}.initial_weights", UNSET, text)
    if config.adapter.kind == "lokr":
        _require_for_products(config, config.adapter, at)
    if config.adapter.dora and config.adapter_file.layout == "ai-toolkit":
        text = (
            "must be kohya, diffusers or bfl if adapter.dora is on: it has no name for magnitudes"
        )
        raise ConfigError(f"{at}.adapter_file.layout", config.adapter_file.layout, text)
    if config.optim.name == "prodigy" and not config.adapter.rates.is_one:
        given = config.adapter.rates.model_dump(exclude_defaults=True)
        text = "must be left out if optim.name is prodigy: it finds one step size for all"
        raise ConfigError(f"{at}.adapter.rates", given, text)
    clip = config.adapter.clip
    if config.optim.name == "prodigy" and clip is not None and not clip.is_one:
        field = "up" if clip.rate == 1 else "rate"
        text = "must be 1 if optim.name is prodigy: it finds one step size for all"
        raise ConfigError(f"{at}.adapter.clip.{field}", getattr(clip, field), text)
    if clip is not None and config.data.validation is not None:
        text = "must be none if adapter.clip is set: its pooled vectors are of CLIP as it was; use "
        text += "data.validation_split"
        raise ConfigError(f"{at}.data.validation", config.data.validation, text)
    _require_layers(config.adapter, config.model, f"{at}.adapter")


def _require_for_products(config: RunConfig, adapter: AdapterConfig, at: str) -> None:
    layout = config.adapter_file.layout
    if layout not in ("kohya", "bfl"):
        text = "must be kohya or bfl if adapter.kind is lokr: the others have no place for products"
        raise ConfigError(f"{at}.adapter_file.layout", layout, text)
    if adapter.rates.up != 1:
        text = "must be 1 if adapter.kind is lokr: it has no matrices B"
        raise ConfigError(f"{at}.adapter.rates.up", adapter.rates.up, text)


def _require_layers(adapter: AdapterConfig, model: ModelConfig, at: str) -> None:
    """Raise ConfigError unless ``adapter`` selects blocks of ``model``, and some of their layers."""
    depths = {"double_blocks": model.depth, "single_blocks": model.depth_single_blocks}
    num_layers, present = 0, set[str]()
    for field, count in depths.items():
        text = getattr(adapter, field)
        try:
            num_blocks = len(selected_blocks(text, count))
        except ValueError as error:
            raise ConfigError(f"{at}.{field}", text, str(error)) from None
        names = [name for name in get_args(LayerName) if _is_of(name, field)]
        num_layers += num_blocks * sum(map(adapter.has_layer, names))
        present.update(name for name in names if num_blocks and adapter.rank_of(kind_of(name)))
    if num_layers == 0:
        given = adapter.model_dump(include={"ranks", "layers", *depths}, exclude_none=True)
        raise ConfigError(at, given, "must leave at least one layer an adapter")
    for number, name in enumerate(adapter.layers):
        if name not in present:
            text = "must be a layer of the selected blocks whose kind has a rank: it would have no effect"
            raise ConfigError(f"{at}.layers[{number}]", name, text)


def _is_of(name: str, blocks: str) -> bool:
    return kind_of(name).startswith("single") == (blocks == "single_blocks")
