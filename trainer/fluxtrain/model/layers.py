"""Names of the transformer's tensors in BFL's layout, which is ours, and in diffusers'.

diffusers has separate tensors for queries, keys, values and a single block's MLP, which BFL concatenates
by rows; and the halves of the final modulation are swapped (BFL: shift, scale).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from fluxtrain.contract.run.adapter import AdapterConfig, LokrConfig, kind_of, selected_blocks
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.model import DEPTHS, TIMESTEP_DIM, ModelConfig

Shape = tuple[int, ...]

_STREAMS = {
    "img": ("norm1", ("to_q", "to_k", "to_v"), ("norm_q", "norm_k"), "to_out.0", "ff"),
    "txt": (
        "norm1_context",
        ("add_q_proj", "add_k_proj", "add_v_proj"),
        ("norm_added_q", "norm_added_k"),
        "to_add_out",
        "ff_context",
    ),
}
_EMBEDDERS = {
    "time_in": "timestep_embedder",
    "vector_in": "text_embedder",
    "guidance_in": "guidance_embedder",
}


@dataclass(frozen=True)
class Entry:
    """One of BFL's tensors: its shape, and diffusers' tensors that hold its rows, in order."""

    name: str
    shape: Shape
    parts: tuple[tuple[str, int], ...]  # diffusers' name, number of rows
    swapped: bool = False  # its two halves are swapped


def entries(model: ModelConfig) -> Iterator[Entry]:
    """Yield every tensor of the transformer ``model``."""
    hidden, mlp = model.hidden_size, int(model.hidden_size * model.mlp_ratio)
    yield from _linear("img_in", hidden, model.in_channels, "x_embedder")
    yield from _linear("txt_in", hidden, model.context_in_dim, "context_embedder")
    inputs = {"time_in": TIMESTEP_DIM, "vector_in": model.vec_in_dim}
    if model.guidance_embed:
        inputs["guidance_in"] = TIMESTEP_DIM
    for name, width in inputs.items():
        other = f"time_text_embed.{_EMBEDDERS[name]}"
        yield from _linear(f"{name}.in_layer", hidden, width, f"{other}.linear_1")
        yield from _linear(f"{name}.out_layer", hidden, hidden, f"{other}.linear_2")
    for i in range(model.depth):
        for stream in _STREAMS:
            yield from _stream(stream, i, hidden, mlp, hidden // model.num_heads)
    for i in range(model.depth_single_blocks):
        yield from _single(i, hidden, mlp, hidden // model.num_heads)
    yield from _linear("final_layer.linear", model.out_channels, hidden, "proj_out")
    last = "final_layer.adaLN_modulation.1"
    for entry in _linear(last, 2 * hidden, hidden, "norm_out.linear"):
        yield Entry(entry.name, entry.shape, entry.parts, swapped=True)


def _stream(stream: str, i: int, hidden: int, mlp: int, head: int) -> Iterator[Entry]:
    mod, qkv, norms, proj, ff = _STREAMS[stream]
    block, other = f"double_blocks.{i}.{stream}", f"transformer_blocks.{i}"
    thirds = tuple((f"{other}.attn.{name}", hidden) for name in qkv)
    yield from _linear(f"{block}_mod.lin", 6 * hidden, hidden, f"{other}.{mod}.linear")
    yield from _fused(f"{block}_attn.qkv", hidden, thirds)
    yield from _norms(f"{block}_attn.norm", head, [f"{other}.attn.{name}" for name in norms])
    yield from _linear(f"{block}_attn.proj", hidden, hidden, f"{other}.attn.{proj}")
    yield from _linear(f"{block}_mlp.0", mlp, hidden, f"{other}.{ff}.net.0.proj")
    yield from _linear(f"{block}_mlp.2", hidden, mlp, f"{other}.{ff}.net.2")


def _single(i: int, hidden: int, mlp: int, head: int) -> Iterator[Entry]:
    block, other = f"single_blocks.{i}", f"single_transformer_blocks.{i}"
    rows = [(f"{other}.attn.{name}", hidden) for name in ("to_q", "to_k", "to_v")]
    yield from _linear(f"{block}.modulation.lin", 3 * hidden, hidden, f"{other}.norm.linear")
    yield from _fused(f"{block}.linear1", hidden, (*rows, (f"{other}.proj_mlp", mlp)))
    yield from _linear(f"{block}.linear2", hidden, hidden + mlp, f"{other}.proj_out")
    yield from _norms(f"{block}.norm", head, [f"{other}.attn.norm_q", f"{other}.attn.norm_k"])


def _linear(name: str, outputs: int, inputs: int, other: str) -> Iterator[Entry]:
    yield from _fused(name, inputs, ((other, outputs),))


def _fused(name: str, inputs: int, parts: tuple[tuple[str, int], ...]) -> Iterator[Entry]:
    rows = sum(count for _, count in parts)
    for kind, shape in (("weight", (rows, inputs)), ("bias", (rows,))):
        named = tuple((f"{other}.{kind}", count) for other, count in parts)
        yield Entry(f"{name}.{kind}", shape, named)


def _norms(name: str, head: int, others: list[str]) -> Iterator[Entry]:
    for which, other in zip(("query_norm", "key_norm"), others, strict=True):
        yield Entry(f"{name}.{which}.scale", (head,), ((f"{other}.weight", head),))


@dataclass(frozen=True)
class Kronecker:
    """Shapes of w1 and w2, whose Kronecker product has the shape of a weight; each may be of low rank."""

    first: Shape
    second: Shape
    rank: int
    is_first_low: bool
    """Whether w1 is a product of rank ``rank``."""
    is_second_low: bool

    @staticmethod
    def of(outputs: int, inputs: int, rank: int, config: LokrConfig) -> Kronecker:
        """Return the factors of a weight of ``outputs`` rows and ``inputs`` columns."""
        rows, columns = divided(outputs, config.factor), divided(inputs, config.factor)
        first, second = zip(rows, columns, strict=True)
        may_be_low = not config.full_matrix
        return Kronecker(
            first,
            second,
            rank,
            may_be_low and config.decompose_both and rank < max(first) / 2,
            may_be_low and rank < max(second) / 2,
        )

    @property
    def shapes(self) -> dict[str, Shape]:
        """Return the shapes of the parameters by LyCORIS' names."""
        found = dict[str, Shape]()
        for name, shape, is_low in (
            ("lokr_w1", self.first, self.is_first_low),
            ("lokr_w2", self.second, self.is_second_low),
        ):
            if is_low:
                found |= {f"{name}_a": (shape[0], self.rank), f"{name}_b": (self.rank, shape[1])}
            else:
                found[name] = shape
        return found

    def scale(self, alpha: float) -> float:
        """Return the factor of the product: 1 if no rank limits it."""
        return alpha / self.rank if self.is_first_low or self.is_second_low else 1.0

    @property
    def saved(self) -> int:
        """Return the numbers that a token's update keeps for the backward pass, besides its inputs."""
        columns, rows = self.first[1], self.second[0]
        return columns * (rows + (self.rank if self.is_second_low else 0))

    @property
    def flops(self) -> tuple[int, int]:
        """Return the FLOPs of a token's update: of the product with its inputs, and of what follows."""
        (rows1, columns1), (rows2, columns2) = self.first, self.second
        last = 2 * rows2 * columns1 * rows1
        if self.is_second_low:
            return 2 * columns1 * columns2 * self.rank, 2 * columns1 * self.rank * rows2 + last
        return 2 * columns1 * columns2 * rows2, last


def divided(count: int, factor: int) -> tuple[int, int]:
    """Return two numbers whose product is ``count``, the smaller first: as large as ``factor`` allows.

    A factor below 0 is no limit: the two are then as equal as they can be.
    """
    limit = math.isqrt(count) if factor < 0 else min(factor, math.isqrt(count))
    smaller = next(each for each in range(limit, 0, -1) if count % each == 0)
    return smaller, count // smaller


BLOCKS = tuple(DEPTHS)
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
HADAMARD_FACTORS = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
"""LyCORIS' names of the matrices of LoHa."""
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
    is_loha: bool = False
    """Whether the update is a Hadamard product of two low-rank matrices."""

    @property
    def kronecker(self) -> Kronecker | None:
        """Return the factors of the update; None of a low-rank one."""
        if self.lokr is None:
            return None
        return Kronecker.of(self.outputs, self.inputs, self.rank, self.lokr)

    @property
    def is_low_rank(self) -> bool:
        """Return whether its update is B A."""
        return self.lokr is None and not self.is_loha

    @property
    def outputs(self) -> int:
        """Return the rows of the layer's weight."""
        return sum(rows for _, rows in self.parts)

    @property
    def saved(self) -> int:
        """Return the numbers that a token's update keeps for the backward pass, besides its inputs."""
        if self.is_loha:
            return 0
        factors = self.kronecker
        saved = self.rank * len(self.splits) if factors is None else factors.saved
        return saved + (self.outputs if self.is_dora else 0)

    @property
    def scale(self) -> float:
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
        if self.is_loha:
            both: tuple[Shape, Shape] = (self.outputs, self.rank), (self.rank, self.inputs)
            return dict(zip(HADAMARD_FACTORS, both * 2, strict=True))
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
        blocks: selected_blocks(getattr(adapter, blocks), depth)
        for blocks, depth in model.depths.items()
    }
    layers = []
    for name, (inputs, parts) in linear_layers(model).items():
        blocks, number, layer = name.split(".", 2)
        if int(number) in selected[blocks] and adapter.has_layer(layer):
            rank = adapter.rank_of(kind_of(layer))
            is_split = adapter.split_qkv and len(parts) > 1
            lokr = adapter.lokr if adapter.kind == "lokr" else None
            kind = lokr, adapter.dora, adapter.kind == "loha"
            layers.append(AdaptedLayer(name, inputs, parts, rank, adapter.alpha, is_split, *kind))
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
    counts = [0] * model.num_blocks
    for layer in block_layers(model, adapter):
        counts[block_number(layer.name, model)] += _padded(layer, num_shards)
    return tuple(counts)


def _padded(layer: AdaptedLayer, num_shards: int) -> int:
    return sum(padded(shape, num_shards) for shape in layer.shapes.values())


def padded(shape: Shape, num_shards: int) -> int:
    """Return the values of a tensor whose rows are rounded up to a multiple of the shards, as FSDP2 does."""
    return num_shards * values_of_shard(shape, num_shards)


def values_of_shard(shape: Shape, num_shards: int) -> int:
    """Return the values in the largest of ``num_shards`` blocks of rows."""
    rows, *columns = shape
    return -(-rows // num_shards) * prod(columns)


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
