"""The CLIP text encoder as a part of the model, for the training of its adapters.

Tensors are named as in the published files of CLIP, from ``text_model.`` on.
Axes: b batch, l text tokens, d width, h heads, k head width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the usual name)

from fluxtrain.contract.run.adapter import AdapterConfig
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.model.blocks import any_attention
from fluxtrain.model.cost import BYTES
from fluxtrain.model.layers import (
    CLIP_LAYERS,
    CLIP_MLP_RATIO,
    AdaptedLayer,
    clip_layers,
    padded,
)

CLIP_LENGTH = 77
"""Tokens that CLIP's text model was trained on."""


@dataclass(frozen=True)
class ClipShape:
    """The shape of CLIP-L's text model, of another width or vocabulary if it is a small one."""

    width: int = 768
    vocabulary: int = 49_408
    positions: int = CLIP_LENGTH
    num_heads: int = 12
    end_token: int = 49_407
    """The pooled vector is the state at the first of them."""
    eps: float = 1e-5

    @staticmethod
    def of(model: ModelConfig) -> ClipShape:
        """Return the shape of the encoder whose pooled vector ``model`` takes."""
        return ClipShape(width=model.vec_in_dim)


@dataclass(frozen=True)
class ClipWeights:
    """The shape of an encoder, and its tensors by name."""

    shape: ClipShape
    tensors: Mapping[str, Tensor] = field(repr=False)


class ClipText(nn.Module):
    """Encodes token ids to the pooled vector."""

    def __init__(self, shape: ClipShape) -> None:
        super().__init__()
        self.end_token = shape.end_token
        layers = nn.Sequential(*(_Layer(shape) for _ in range(CLIP_LAYERS)))
        self.text_model = nn.Sequential(
            OrderedDict(
                embeddings=_Embeddings(shape),
                encoder=nn.Sequential(OrderedDict(layers=layers)),
                final_layer_norm=nn.LayerNorm(shape.width, eps=shape.eps),
            )
        )

    @any_attention
    def forward(self, ids: Int[Tensor, "b l"]) -> Float[Tensor, "b d"]:
        """Return the last state at the first end token of ``ids``."""
        states: Tensor = self.text_model(ids)
        ends = (ids == self.end_token).int().argmax(dim=1)
        index = ends[:, None, None].expand(-1, 1, states.shape[-1])
        return states.gather(1, index).sum(dim=1)  # of one: FSDP2 warns of views


class _Embeddings(nn.Module):
    def __init__(self, shape: ClipShape) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.position_embedding = nn.Embedding(shape.positions, shape.width)

    def forward(self, ids: Int[Tensor, "b l"]) -> Float[Tensor, "b l d"]:
        states: Tensor = self.token_embedding(ids) + self.position_embedding.weight[: ids.shape[1]]
        return states


class _Layer(nn.Module):
    """Attention to earlier tokens, then an MLP, each after a norm and added to its input."""

    def __init__(self, shape: ClipShape) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(shape.width, eps=shape.eps)
        self.self_attn = _Attention(shape.width, shape.num_heads)
        self.layer_norm2 = nn.LayerNorm(shape.width, eps=shape.eps)
        self.mlp = _Mlp(shape.width, CLIP_MLP_RATIO * shape.width)

    def forward(self, x: Float[Tensor, "b l d"]) -> Float[Tensor, "b l d"]:
        x = x + self.self_attn(self.layer_norm1(x))
        added: Tensor = x + self.mlp(self.layer_norm2(x))
        return added


class _Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.out_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Float[Tensor, "b l d"]) -> Float[Tensor, "b l d"]:
        q, k, v = (
            rearrange(project(x), "b l (h k) -> b h l k", h=self.num_heads)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out_proj(rearrange(heads, "b h l k -> b l (h k)"))
        return out


class _Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Float[Tensor, "b l d"]) -> Float[Tensor, "b l d"]:
        hidden = self.fc1(x)
        out: Tensor = self.fc2(hidden * torch.sigmoid(1.702 * hidden))  # CLIP's quick GELU
        return out


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
    return sum(padded(shape, num_shards) for shape in _shapes(ClipShape.of(model)))


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
