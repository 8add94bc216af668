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
    factor: float = getattr(adapter.rates, kind_of(layer.split(".", 2)[2]))
    return factor * adapter.rates.up if matrix == "lora_B" else factor


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


def adapted_layers(model: ModelConfig, adapter: AdapterConfig) -> list[AdaptedLayer]:
    """Return the layers of ``model`` that ``adapter`` adapts, in the order of the model."""
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
    return sum(adapters_of_blocks(model, adapter, num_shards))


@lru_cache(maxsize=16)  # a plan asks for them at each micro batch that it tries
def adapters_of_blocks(
    model: ModelConfig, adapter: AdapterConfig, num_shards: int = 1
) -> tuple[int, ...]:
    """Return the adapters' parameters of each block, double blocks first, rounded up in the same way."""
    counts = [0] * (model.depth + model.depth_single_blocks)
    for layer in adapted_layers(model, adapter):
        index = block_index(layer, model)
        for rows, *columns in layer.shapes.values():
            counts[index] += -(-rows // num_shards) * num_shards * prod(columns)
    return tuple(counts)


def block_index(layer: AdaptedLayer, model: ModelConfig) -> int:
    """Return the number of the block of ``layer``, double blocks first."""
    blocks, number, *_ = layer.name.split(".")
    return int(number) + (model.depth if blocks == "single_blocks" else 0)


def has_small_base(config: RunConfig) -> bool:
    """Return whether the frozen weights of the blocks' linear layers are in 8 bits."""
    return config.adapter is not None and config.adapter.base_dtype == "fp8"


def dora_rows(config: RunConfig) -> int:
    """Return the rows of the layers that have magnitudes."""
    if config.adapter is None or not config.adapter.dora:
        return 0
    return sum(layer.outputs for layer in adapted_layers(config.model, config.adapter))
