"""What a block does not save for its backward pass because some of its layers have no adapter.

A frozen layer needs no input of its own for the gradients that it passes on; frozen modulations need neither
the norms that they scale nor the outputs that they gate.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fluxtrain.contract.run.adapter import AdapterConfig
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.model.activations import BYTES
from fluxtrain.model.adapted_layers import block_layers, block_number


@dataclass(frozen=True)
class UnsavedInputs:
    """Bytes of one sample that one block does not save."""

    total: int
    freed: tuple[int, ...]
    """Those of them that each moment of `block_moments` takes for freed; the rest take none."""


def unsaved_inputs(config: RunConfig, index: int) -> UnsavedInputs:
    """Return what block ``index``, double blocks first, does not save as some layers have no adapter."""
    if config.adapter is None:
        return UnsavedInputs(0, ())
    adapted = _adapted(config.model, config.adapter)[index]
    if index >= config.model.depth:
        total = _single_block(config, adapted)
        return UnsavedInputs(total, (0, total))
    lengths = {"txt": config.data.text_length, "img": config.image_tokens}
    attention, mlp = (
        [int(units(config, adapted, name) * _unit(config) * n) for name, n in lengths.items()]
        for units in (_attention_units, _mlp_units)
    )
    return UnsavedInputs(sum(attention) + sum(mlp), (0, mlp[0], sum(mlp)))


@lru_cache(maxsize=16)  # a plan asks for each block, at each micro batch that it tries
def _adapted(model: ModelConfig, adapter: AdapterConfig) -> tuple[frozenset[str], ...]:
    """Return the names of the layers with adapters in each block, without the block's."""
    found = [set[str]() for _ in range(model.depth + model.depth_single_blocks)]
    for layer in block_layers(model, adapter):
        found[block_number(layer.name, model)].add(layer.name.split(".", 2)[2])
    return tuple(map(frozenset, found))


def _single_block(config: RunConfig, adapted: frozenset[str]) -> int:
    units = 1.0 * ("linear1" not in adapted)
    units += (1 + config.model.mlp_ratio) * ("linear2" not in adapted)
    units += _modulation_units(config, "modulation.lin" in adapted)
    return int(units * _unit(config) * (config.image_tokens + config.data.text_length))


def _attention_units(config: RunConfig, adapted: frozenset[str], stream: str) -> float:
    inputs = sum(f"{stream}_attn.{name}" not in adapted for name in ("qkv", "proj"))
    return inputs + _modulation_units(config, f"{stream}_mod.lin" in adapted)


def _mlp_units(config: RunConfig, adapted: frozenset[str], stream: str) -> float:
    units = 1.0 * (f"{stream}_mlp.0" not in adapted)
    units += config.model.mlp_ratio * (f"{stream}_mlp.2" not in adapted)
    return units + _modulation_units(config, f"{stream}_mod.lin" in adapted)


def _modulation_units(config: RunConfig, is_adapted: bool) -> int:
    """Return the units of a norm, which compiled blocks compute again, and of an output."""
    if is_adapted or config.trains_clip:  # CLIP's pooled vector then needs a gradient
        return 0
    return 1 if config.parallel.compiles(has_gpu=True) else 2


def _unit(config: RunConfig) -> int:
    """Return the bytes of one token as wide as the model."""
    return config.model.hidden_size * BYTES[config.precision.compute]
