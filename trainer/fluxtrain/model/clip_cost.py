"""What it costs to train adapters of CLIP: frozen weights, FLOPs, and activations that are saved."""

from __future__ import annotations

from functools import lru_cache
from math import prod

import torch

from fluxtrain.contract.run.adapter import AdapterConfig
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.model.activations import BYTES
from fluxtrain.model.adapted_layers import CLIP_LAYERS, AdaptedLayer, clip_layers
from fluxtrain.model.clip import CLIP_LENGTH, ClipShape, ClipText

_SAVED_UNITS = 26
"""Units, a tensor of the tokens as wide as CLIP, that a layer saves: both norms' inputs and outputs, q, k, v,
attended heads, which are saved in two shapes, and of the MLP four, each four units wide."""
_FIRST_LAYER = ".layers.0.self_attn."


def frozen_clip_parameters(
    model: ModelConfig, adapter: AdapterConfig | None, num_shards: int = 1
) -> int:
    """Return the frozen parameters of CLIP beside ``model``, 0 if its adapters are not trained.

    The rows of each tensor are rounded up to a multiple of ``num_shards``.
    """
    if adapter is None or adapter.clip is None:
        return 0
    shapes = _shapes(ClipShape.of(model))
    return sum(-(-rows // num_shards) * num_shards * prod(rest) for rows, *rest in shapes)


@lru_cache(maxsize=16)
def _shapes(shape: ClipShape) -> tuple[tuple[int, ...], ...]:
    with torch.device("meta"):
        return tuple(tuple(each.shape) for each in ClipText(shape).parameters())


def clip_flops(config: RunConfig) -> int:
    """Return the FLOPs of CLIP's forward and backward pass for one sample, 0 if its adapters are not trained.

    The first layer's queries, keys and values need no gradient of their input.
    """
    if config.adapter is None:
        return 0
    layers = clip_layers(config.model, config.adapter)
    attention = CLIP_LAYERS * 4 * CLIP_LENGTH**2 * config.model.vec_in_dim
    return sum(map(_layer_flops, layers)) + (3 * attention if layers else 0)


def recomputed_clip_flops(config: RunConfig) -> int:
    """Return the FLOPs of the scores of CLIP's attention, which its backward pass computes again."""
    return config.trains_clip * CLIP_LAYERS * 2 * CLIP_LENGTH**2 * config.model.vec_in_dim


def _layer_flops(layer: AdaptedLayer) -> int:
    is_first = _FIRST_LAYER in layer.name and not layer.name.endswith("out_proj")
    base = 2 * CLIP_LENGTH * layer.inputs * layer.outputs
    down, up = (2 * CLIP_LENGTH * prod(layer.shapes[each]) for each in ("lora_A", "lora_B"))
    return base * (1 if is_first else 2) + down * (2 if is_first else 3) + 3 * up


def saved_by_clip(config: RunConfig) -> int:
    """Return the bytes per sample that CLIP's forward pass saves, 0 if its adapters are not trained."""
    if config.adapter is None or config.adapter.clip is None:
        return 0
    low = sum(layer.rank for layer in clip_layers(config.model, config.adapter))
    units = CLIP_LAYERS * _SAVED_UNITS * config.model.vec_in_dim
    dropped = 2 if config.adapter.dropout else 1
    return CLIP_LENGTH * (units + dropped * low) * BYTES[config.precision.compute]
