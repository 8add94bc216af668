"""The linear layers that get a LoRA adapter, with their ranks; without torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from fluxtrain.contract.run.adapter import AdapterConfig, LokrConfig, kind_of, selected_blocks
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.model.kronecker import Kronecker
from fluxtrain.model.tensor_names import Shape, entries

BLOCKS = ("double_blocks", "single_blocks")
TEXT_ENCODER = "text_encoder"
"""Name of the CLIP text encoder in the model, if its adapters are trained; as in diffusers' files."""
CLIP_LAYERS, CLIP_MLP_RATIO = 12, 4
"""Of CLIP-L: its layers, and the width of their MLPs over that of the model."""
_CLIP_BLOCK = f"{TEXT_ENCODER}.text_model.encoder.layers"
_CLIP_SHAPES = {
    **{f"self_attn.{name}_proj": (1, 1) for name in ("q", "k", "v", "out")},
    "mlp.fc1": (CLIP_MLP_RATIO, 1),
    "mlp.fc2": (1, CLIP_MLP_RATIO),
}
"""Rows and columns of the linear layers of each of CLIP's layers, over the width."""
_WEIGHT = ".weight"
MAGNITUDE = "magnitude"
"""Name of the change of DoRA's magnitudes, one for each row of a layer's weight."""
BASE_MAGNITUDE = "base_magnitude"
"""Name of the magnitudes before the training: the norms of the weight's rows."""
WHOLE_MAGNITUDE = "whole_magnitude"
"""Name of the magnitudes themselves: the sum of both."""


@dataclass(frozen=True)
class AdaptedLayer:
    """A linear layer of a block and its adapter, which adds ``scale`` B A x to the layer's output."""

    name: str
    """In the model, and in BFL's layout: ``double_blocks.0.img_attn.qkv``."""
    inputs: int
    parts: tuple[tuple[str, int], ...]
    """diffusers' layers that hold its rows, in order: name, number of rows."""
    rank: int
    alpha: float
    is_split: bool = False
    """Whether each part has an A of its own."""
    lokr: LokrConfig | None = None
    """Division into the factors of a Kronecker product; None: a low-rank update."""
    is_dora: bool = False
    """Whether the rows of the updated weight get magnitudes of their own."""

    @property
    def kronecker(self) -> Kronecker | None:
        """Return the factors of the update; None of a low-rank one."""
        if self.lokr is None:
            return None
        return Kronecker.of(self.outputs, self.inputs, self.rank, self.lokr)

    @property
    def outputs(self) -> int:
        """Return the rows of the layer's weight."""
        return sum(rows for _, rows in self.parts)

    @property
    def scale(self) -> float:
        """Return the factor of the update."""
        factors = self.kronecker
        return self.alpha / self.rank if factors is None else factors.scale(self.alpha)

    @property
    def splits(self) -> tuple[int, ...]:
        """Return the rows of the outputs that each A serves."""
        return tuple(rows for _, rows in self.parts) if self.is_split else (self.outputs,)

    @property
    def shapes(self) -> dict[str, Shape]:
        """Return the shapes of the adapter's parameters; those of several A are stacked."""
        if (factors := self.kronecker) is not None:
            return factors.shapes
        stacked = self.rank * len(self.splits)
        found: dict[str, Shape] = {
            "lora_A": (stacked, self.inputs),
            "lora_B": (self.outputs, self.rank),
        }
        return found | {MAGNITUDE: (self.outputs,)} if self.is_dora else found


def rate_of(name: str, adapter: AdapterConfig | None) -> float:
    """Return the factor of the learning rate of parameter ``name``, of an adapter if there are some."""
    if adapter is None:
        return 1.0
    layer, _, matrix = name.rpartition(".")
    factor: float
    clip, up = adapter.clip, adapter.rates.up
    if clip is not None and is_clip(name):
        factor, up = clip.rate, up if clip.up is None else clip.up
    else:
        factor = getattr(adapter.rates, kind_of(layer.split(".", 2)[2]))
    return factor * up if matrix == "lora_B" else factor


def linear_layers(model: ModelConfig) -> dict[str, tuple[int, tuple[tuple[str, int], ...]]]:
    """Return the blocks' linear layers by name: the width of their inputs, and diffusers' parts."""
    return {
        entry.name.removesuffix(_WEIGHT): (
            entry.shape[1],
            tuple((part.removesuffix(_WEIGHT), rows) for part, rows in entry.parts),
        )
        for entry in entries(model)
        if entry.name.startswith(BLOCKS) and entry.name.endswith(_WEIGHT)
    }


def is_clip(name: str) -> bool:
    """Return whether ``name``, of a layer or a parameter, is one of the CLIP text encoder."""
    return name.startswith(f"{TEXT_ENCODER}.")


def clip_linear_layers(width: int) -> dict[str, tuple[int, int]]:
    """Return the linear layers of CLIP's text encoder of ``width`` by name: their outputs and inputs."""
    return {
        f"{_CLIP_BLOCK}.{index}.{name}": (rows * width, columns * width)
        for index in range(CLIP_LAYERS)
        for name, (rows, columns) in _CLIP_SHAPES.items()
    }


def clip_layers(model: ModelConfig, adapter: AdapterConfig) -> list[AdaptedLayer]:
    """Return the layers of CLIP that ``adapter`` adapts, beside ``model``."""
    if adapter.clip is None:
        return []
    rank, alpha = adapter.clip.rank, adapter.clip.alpha
    return [
        AdaptedLayer(name, inputs, ((name, outputs),), rank, alpha)
        for name, (outputs, inputs) in clip_linear_layers(model.vec_in_dim).items()
    ]


def adapted_layers(model: ModelConfig, adapter: AdapterConfig) -> list[AdaptedLayer]:
    """Return the layers of ``model`` that ``adapter`` adapts, in its order, then those of CLIP."""
    return [*block_layers(model, adapter), *clip_layers(model, adapter)]


def block_layers(model: ModelConfig, adapter: AdapterConfig) -> list[AdaptedLayer]:
    """Return the layers of the blocks of ``model`` that ``adapter`` adapts, in the order of the model."""
    selected = {
        "double_blocks": selected_blocks(adapter.double_blocks, model.depth),
        "single_blocks": selected_blocks(adapter.single_blocks, model.depth_single_blocks),
    }
    layers = []
    for name, (inputs, parts) in linear_layers(model).items():
        blocks, number, layer = name.split(".", 2)
        if int(number) in selected[blocks] and adapter.has_layer(layer):
            rank = adapter.rank_of(kind_of(layer))
            is_split = adapter.split_qkv and len(parts) > 1
            lokr = adapter.lokr if adapter.kind == "lokr" else None
            given = (name, inputs, parts, rank, adapter.alpha, is_split, lokr, adapter.dora)
            layers.append(AdaptedLayer(*given))
    return layers


def count_adapter_parameters(
    model: ModelConfig, adapter: AdapterConfig, num_shards: int = 1
) -> int:
    """Return the adapters' parameters; the rows of each tensor are rounded up to a multiple of the shards."""
    clip = sum(_padded(layer, num_shards) for layer in clip_layers(model, adapter))
    return sum(adapters_of_blocks(model, adapter, num_shards)) + clip


@lru_cache(maxsize=16)  # a plan asks for them at each micro batch that it tries
def adapters_of_blocks(
    model: ModelConfig, adapter: AdapterConfig, num_shards: int = 1
) -> tuple[int, ...]:
    """Return the adapters' parameters of each block, double blocks first, rounded up in the same way."""
    counts = [0] * (model.depth + model.depth_single_blocks)
    for layer in block_layers(model, adapter):
        counts[block_index(layer, model)] += _padded(layer, num_shards)
    return tuple(counts)


def _padded(layer: AdaptedLayer, num_shards: int) -> int:
    """Return the parameters of ``layer``'s adapter; rows are rounded up to a multiple of the shards."""
    shapes = layer.shapes.values()
    return sum(-(-rows // num_shards) * num_shards * prod(rest) for rows, *rest in shapes)


def block_index(layer: AdaptedLayer, model: ModelConfig) -> int:
    """Return the number of the block of ``layer``, double blocks first."""
    return block_number(layer.name, model)


def block_number(name: str, model: ModelConfig) -> int:
    """Return the number of the block with the layer ``name``, double blocks first."""
    blocks, number, *_ = name.split(".")
    return int(number) + (model.depth if blocks == "single_blocks" else 0)


def has_small_base(config: RunConfig) -> bool:
    """Return whether the frozen weights of the blocks' linear layers are in 8 bits."""
    return config.adapter is not None and config.adapter.base_dtype == "fp8"


def dora_rows(config: RunConfig) -> int:
    """Return the rows of the layers that have magnitudes."""
    if config.adapter is None or not config.adapter.dora:
        return 0
    return sum(layer.outputs for layer in block_layers(config.model, config.adapter))
