"""What a sample costs: FLOPs of its matrix products, activations that are saved, bytes in host memory.

A multiplication or an addition is one FLOP; element-wise operations are not counted, and attention, which is
bidirectional, is counted in full, as by ``torch.utils.flop_counter``. A linear layer from i to o costs 2 i o
per row. Activations are counted from the tensors in model/blocks.py, those of a GPU, where blocks are
compiled unless the config says otherwise; the tests compare the counts with measured ones. h is the hidden
width, r the MLP's width over h; one unit is a tensor of the block's tokens, h wide, in the compute dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, repeat
from math import prod

from fluxtrain.contract.run.adapter import AdapterConfig
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.model import TIMESTEP_DIM, ModelConfig
from fluxtrain.model.layers import (
    adapters_of_blocks,
    block_layers,
    block_number,
    entries,
    has_small_base,
    linear_layers,
)

_FLOAT32 = 4
BYTES = {"bfloat16": 2, "float32": 4}
"""Bytes of one number in each precision."""

_EMBEDDERS = ("time_in", "vector_in", "guidance_in")
_FIRST = ("img_in.weight", "txt_in.weight", *(f"{e}.in_layer.weight" for e in _EMBEDDERS))


@dataclass(frozen=True)
class Linear:
    """A linear layer of the model, and the rows of one sample that it is applied to."""

    name: str
    rows: int
    inputs: int
    outputs: int

    @property
    def flops(self) -> int:
        """Return the FLOPs of its forward pass for one sample."""
        return 2 * self.rows * self.inputs * self.outputs

    @property
    def is_first(self) -> bool:
        """Return whether its input is the model's, which needs no gradient."""
        return self.name in _FIRST


def forward_flops(config: ModelConfig, image_tokens: int, text_tokens: int) -> int:
    tokens = image_tokens + text_tokens
    attention = 4 * tokens * tokens * config.hidden_size  # queries x keys and weights x values
    layers = linears(config, image_tokens, text_tokens)
    return sum(layer.flops for layer in layers) + config.num_blocks * attention


def training_flops(config: ModelConfig, image_tokens: int, text_tokens: int) -> int:
    """Return the FLOPs of forward and backward for one sample, without recomputation.

    Each product costs two in the backward pass, one if the layer's input needs no gradient. A model
    without single blocks does not use its last text stream, whose few backward FLOPs are still counted.
    """
    layers = linears(config, image_tokens, text_tokens)
    inputs = sum(layer.flops for layer in layers if layer.is_first)
    return 3 * forward_flops(config, image_tokens, text_tokens) - inputs


def recomputed_flops(
    config: ModelConfig, image_tokens: int, text_tokens: int, fraction: float, keeps_scores: bool
) -> int:
    """Return the FLOPs for one sample that the backward pass computes again.

    The scores of attention, unless it ``keeps_scores``, and the forward pass of ``fraction`` of the blocks.
    """
    tokens = image_tokens + text_tokens
    scores = 2 * tokens * tokens * config.hidden_size
    again = recomputed_depths(config, fraction)
    total = 0 if keeps_scores else config.num_blocks * scores
    total += sum(again.values()) * 2 * scores
    for layer in linears(config, image_tokens, text_tokens):
        kind, _, rest = layer.name.partition(".")
        total += layer.flops * (kind in again and int(rest.partition(".")[0]) < again[kind])
    return total


def recomputed_depths(config: ModelConfig, fraction: float) -> dict[str, int]:
    """Return how many of the double and of the single blocks the backward pass computes again."""
    depth, singles = config.depth, config.depth_single_blocks
    return {
        "double_blocks": recomputed_blocks(depth, fraction),
        "single_blocks": recomputed_blocks(singles, fraction, depth),
    }


def linears(config: ModelConfig, image_tokens: int, text_tokens: int) -> Iterator[Linear]:
    """Yield every linear layer, named as its weight."""
    for entry in entries(config):
        if len(entry.shape) == 2:
            outputs, inputs = entry.shape
            rows = rows_of(entry.name, image_tokens, text_tokens)
            yield Linear(entry.name, rows, inputs, outputs)


def rows_of(name: str, image_tokens: int, text_tokens: int) -> int:
    """Return the number of rows that the linear layer ``name`` is applied to."""
    if "mod" in name.lower() or name.startswith(_EMBEDDERS):
        return 1  # the vector of the sample
    if name.startswith("single_blocks"):
        return image_tokens + text_tokens
    return text_tokens if "txt_" in name else image_tokens


def is_recomputed(index: int, fraction: float) -> bool:
    """Return whether block ``index`` is one of ``fraction`` of the blocks, spread evenly.

    It is where ``fraction`` times the number of blocks passes a whole number.
    """
    return int((index + 1) * fraction) > int(index * fraction)


def recomputed_blocks(num_blocks: int, fraction: float, start: int = 0) -> int:
    """Return how many of ``num_blocks`` blocks from index ``start`` on recompute their activations."""
    return sum(is_recomputed(index, fraction) for index in range(start, start + num_blocks))


@dataclass(frozen=True)
class Saved:
    """Bytes that one block saves: per token, and per sample for any number of tokens."""

    per_token: int
    per_sample: int

    def bytes(self, tokens: int) -> int:
        return self.per_token * tokens + self.per_sample


def saved_by_double_block(config: RunConfig) -> Saved:
    """Return the bytes that a double-stream block saves.

    Eager 13 + 2r units: the block's input, norm and modulated input of attention and MLP (6), rotated
    q and k, v, attended (4), input and output of the projection (2), the MLP's output (1), and its
    hidden layer before and after GELU (2r). Compiled: norms are recomputed instead of saved; their kernel
    needs the MLP's input (1).
    """
    width = BYTES[config.precision.compute]
    hidden, ratio = config.model.hidden_size, config.model.mlp_ratio
    if config.parallel.compiles(has_gpu=True):
        units, extra = 10 + 2 * ratio, 3.0 * width * hidden  # q, k and v as projected
        kernels, is_narrow = config.parallel.kernels, config.precision.compute == "bfloat16"
        units += is_narrow and (kernels is None or "blocks" in kernels)
    else:
        units, extra = 13 + 2 * ratio, _query_key_norms(config)
    units += _units_of_math(config, casted=2) - _units_less_in_fp8(config, 3 + ratio)
    statistics = 3 * _per_head(config.model) + 4 * _FLOAT32
    per_token = int(units * width * hidden + extra) + statistics
    return Saved(per_token, 18 * width * hidden + scores_bytes(config))


def saved_by_single_block(config: RunConfig) -> Saved:
    """Return the bytes that a single-stream block saves.

    Eager 11 + 2r units: input, norm, modulated input (3), the output of the first projection (3 + r),
    rotated q and k, attended (3), the second one's input (1 + r) and output (1). Compiled: no norm.
    """
    width, model = BYTES[config.precision.compute], config.model
    hidden, ratio = model.hidden_size, model.mlp_ratio
    if config.parallel.compiles(has_gpu=True):
        # in float32 the compiler saves GELU's input separately from the projection's output
        units = 10 + (3 if width == _FLOAT32 else 2) * ratio
        extra = 0.0
    else:
        units = 11 + 2 * ratio
        # in float32 the norms' inputs are views of the projection's output, which is counted already
        extra = _query_key_norms(config) - (3.0 * width * hidden if width == _FLOAT32 else 0.0)
    units += _units_of_math(config, casted=3) - _units_less_in_fp8(config, 2 + ratio)
    statistics = 3 * _per_head(model) + 2 * _FLOAT32
    per_token = int(units * width * hidden + extra) + statistics
    return Saved(per_token, 5 * width * hidden + scores_bytes(config))


def scores_bytes(config: RunConfig) -> int:
    """Return the bytes of one sample's attention weights in one block, float32; only ``math`` keeps them."""
    if config.parallel.attention != "math":
        return 0
    return _FLOAT32 * config.model.num_heads * _tokens(config) ** 2


def _units_less_in_fp8(config: RunConfig, inputs: float) -> float:
    """Return how many units less linear layers save of ``inputs`` units if they keep them in fp8.

    With a scale for each row they keep what they were given. Compiled blocks were not measured: a CPU's
    graph emulates the products that a GPU has kernels for.
    """
    if config.precision.fp8 != "tensorwise":
        return 0.0
    return inputs * (1 - 1 / BYTES[config.precision.compute])


def _units_of_math(config: RunConfig, casted: int) -> int:
    """Return the units that ``math`` saves beyond what flash attention does.

    That is ``casted`` ones where it casts q, k and v to float32, and one less, its output, where it need not.
    """
    if config.parallel.attention != "math":
        return 0
    return casted if config.precision.compute == "bfloat16" else -1


def _query_key_norms(config: RunConfig) -> float:
    """Return the bytes per token that the eager norms of q and k, in float32, save."""
    hidden = config.model.hidden_size
    # frozen norms do not need q and k after them
    normalised = 2.0 if config.adapter is None else 0.0
    if config.precision.compute == "float32":
        return (3.0 + normalised) * _FLOAT32 * hidden  # the projection: q, k, v
    return (2.0 + normalised) * _FLOAT32 * hidden  # q and k in float32


def _per_head(model: ModelConfig) -> int:
    """Return the bytes per token of one number per head, which the norms of q and k, and attention, save."""
    return model.num_heads * _FLOAT32


def first_layers_bytes(config: RunConfig) -> int:
    """Return the bytes that the embeddings save for one sample, among them the model's inputs."""
    width, model = BYTES[config.precision.compute], config.model
    image, text = config.image_tokens, config.data.text_length
    embedded = image * model.in_channels + text * model.context_in_dim
    vectors = model.vec_in_dim + TIMESTEP_DIM + 10 * model.hidden_size
    return (embedded + vectors) * width


def last_layers_bytes(config: RunConfig) -> int:
    width, model = BYTES[config.precision.compute], config.model
    image, text = config.image_tokens, config.data.text_length
    last = (image + text) * model.hidden_size + 2 * image * model.hidden_size
    loss = 2 * image * model.out_channels * _FLOAT32
    return last * width + loss


# The moments of a block's passes at which most memory is in use, counted from the tensors in
# blocks.py.
#
# The tests compare the counts with measured ones. h is the hidden width, r the MLP's width over h;
# one unit is a tensor of the tokens in question, h wide, in the compute dtype.


_ROUNDING = {
    ("tensorwise", "double"): (29.0, 21.0),
    ("tensorwise", "single"): (34.5, 28.5),
    ("rowwise", "double"): (27.0, 20.5),
    ("rowwise", "single"): (32.0, 32.0),
}
"""Units in use beyond what is saved, at the peaks of the forward and the backward pass of a kind of block
that rounds to fp8 without being compiled, mostly float32 copies; measured with an MLP four times as wide."""


@dataclass(frozen=True)
class Moment:
    """A moment in a block's pass."""

    activations: int
    """Bytes per sample in use beyond all saved activations: gradients and temporary tensors, less what the
    block has freed of its own."""
    gradients: int
    """Parameters of the block whose gradients exist."""


@dataclass(frozen=True)
class BlockMoments:
    """What one kind of block saves, and the moments that may be its peaks."""

    saved: int
    """Bytes per sample that forward saves, the block's input included."""
    inputs: int
    """Bytes per sample of that input."""
    forward: Moment
    backward: tuple[Moment, ...]


def block_moments(config: RunConfig) -> list[BlockMoments]:
    """Return the moments of each block, in the order of the passes, without adapters."""
    model = config.model
    double, single = double_block_moments(config), single_block_moments(config)
    return [double] * model.depth + [single] * model.depth_single_blocks


def double_block_moments(config: RunConfig) -> BlockMoments:
    """Return the moments of a double-stream block.

    Forward ends with both outputs (1 unit) beside what is saved, and with q and k before the norms and after
    them, the projected q, k and v, and attention's output: 9 units, 6 in float32, where the projections are
    saved. Backward begins with the text's MLP, then the image's.
    """
    unit, hidden, ratio = _unit(config), config.model.hidden_size, config.model.mlp_ratio
    text, image = config.data.text_length * unit, config.image_tokens * unit
    both, square = text + image, hidden * hidden
    mlp = 2 * ratio + 3  # units of a stream: both sides of GELU, norm, modulated input, output
    is_float32 = config.precision.compute == "float32"
    held = 6 if is_float32 else 9
    first = int(ratio * square)
    moments = [
        # gradients of both outputs and of GELU's output, and the last layer's weight gradient
        Moment(int(both + ratio * text), first),
        Moment(int(both + ratio * image - mlp * text), int(3 * ratio * square)),
        # attention, whose output's projections are freed too: the gradients of q, k and v
        Moment(int((3 - mlp) * both), int((4 * ratio + 2) * square)),
    ]
    forward = held * both
    # their softmax, in both passes, or the end of the forward pass
    if scores := scores_bytes(config):
        forward = max(forward, scores - 8 * both) if is_float32 else max(10 * both, scores)
        moments.append(Moment(2 * scores - 12 * both, int((4 * ratio + 2) * square)))
    return _with_rounding(config, "double", saved_by_double_block(config), forward, moments)


def single_block_moments(config: RunConfig) -> BlockMoments:
    """Return the moments of a single-stream block.

    Forward: GELU's output beside its concatenation with attention's, and the projection. Backward: the
    gradients of the concatenation, of GELU's input, of q, k and v, after the last projection's inputs
    are freed; later the gradient of the first projection's output.
    """
    unit, hidden, ratio = _unit(config), config.model.hidden_size, config.model.mlp_ratio
    tokens, square = _tokens(config) * unit, hidden * hidden
    saved, first = saved_by_single_block(config), int((1 + ratio) * square)
    late = int((8 + ratio) * tokens) - saved.bytes(_tokens(config))
    moments = [
        Moment(int((3 + ratio) * tokens), first),
        Moment(late, int((4 + 2 * ratio) * square)),
    ]
    forward = int((ratio + 2) * tokens)
    if scores := scores_bytes(config):  # as in a double-stream block
        is_float32 = config.precision.compute == "float32"
        held, beside, freed = (1, -2, 0) if is_float32 else (5, 2, 8)
        forward = max(forward + held * tokens, scores + beside * tokens)
        moments.append(Moment(2 * scores - freed * tokens, first))
    return _with_rounding(config, "single", saved, forward, moments)


def _with_rounding(
    config: RunConfig, kind: str, saved: Saved, forward: int, backward: list[Moment]
) -> BlockMoments:
    """Return the moments of a kind of block, and those of rounding to fp8, which the compiler fuses.

    The gradients are then those of the first moment of the backward pass.
    """
    tokens = _tokens(config)
    if config.precision.fp8 != "none" and not config.parallel.compiles(has_gpu=True):
        wide = tokens * config.model.hidden_size * 2  # bytes of a unit, whatever the compute dtype
        copies, late = (int(units * wide) for units in _ROUNDING[config.precision.fp8, kind])
        forward = max(forward, copies)
        backward = [*backward, Moment(late, backward[0].gradients)]
    inputs = tokens * _unit(config)
    return BlockMoments(saved.bytes(tokens), inputs, Moment(forward, 0), tuple(backward))


def _tokens(config: RunConfig) -> int:
    return config.image_tokens + config.data.text_length


def _unit(config: RunConfig) -> int:
    """Return the bytes of one token."""
    return config.model.hidden_size * BYTES[config.precision.compute]


def with_adapters(moments: BlockMoments, config: RunConfig, index: int) -> BlockMoments:
    """Return ``moments`` of block ``index``, double blocks first, with its adapters.

    They save A x, and with ``dropout`` its factors too, and DoRA's (W + scale B A) x; layers without one do
    not save their inputs. Blocks before the first one that has an adapter save nothing, unless CLIP's
    adapters are trained.
    """
    if config.adapter is None:
        return moments
    counts = adapters_of_blocks(config.model, config.adapter)
    if not any(counts[: index + 1]) and not config.trains_clip:
        return BlockMoments(0, 0, Moment(moments.forward.activations + moments.saved, 0), ())
    lengths = config.image_tokens, config.data.text_length
    elements = _saved_of_blocks(config.model, config.adapter, *lengths)[index]
    elements *= 2 if config.adapter.dropout else 1
    unsaved, size = unsaved_inputs(config, index), BYTES[config.precision.compute]
    saved = moments.saved - unsaved.total + elements * size
    product = size * _largest_products(config.model, config.adapter)[index]
    backward = tuple(
        replace(moment, activations=moment.activations + freed + 4 * product)
        for moment, freed in zip(moments.backward, chain(unsaved.freed, repeat(0)), strict=False)
    )
    forward = replace(moments.forward, activations=moments.forward.activations + 3 * product)
    return replace(moments, forward=forward, saved=saved, backward=backward)


@lru_cache(maxsize=16)
def _largest_products(model: ModelConfig, adapter: AdapterConfig) -> tuple[int, ...]:
    """Return the values of the largest LoHa's matrix in each block.

    Three such matrices are there at once, four in the backward pass.
    """
    largest = [0] * model.num_blocks
    for layer in block_layers(model, adapter) if adapter.kind == "loha" else ():
        index = block_number(layer.name, model)
        largest[index] = max(largest[index], layer.outputs * layer.inputs)
    return tuple(largest)


@lru_cache(maxsize=16)  # of all blocks: a plan asks for each, at each micro batch that it tries
def _saved_of_blocks(
    model: ModelConfig, adapter: AdapterConfig, image_tokens: int, text_length: int
) -> tuple[int, ...]:
    """Return the elements of A x of a sample in each block."""
    counts = [0] * model.num_blocks
    for layer in block_layers(model, adapter):
        rows = rows_of(layer.name, image_tokens, text_length)
        counts[block_number(layer.name, model)] += rows * layer.saved
    return tuple(counts)


# What a block does not save for its backward pass because some of its layers have no adapter.
#
# A frozen layer needs no input of its own for the gradients that it passes on; frozen modulations
# need neither the norms that they scale nor the outputs that they gate.


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
    ratio = config.model.mlp_ratio

    def unsaved(tokens: int, inputs: Mapping[str, float], modulation: str) -> int:
        """Return the bytes of ``inputs`` of layers, in units, and of what ``modulation`` scales and gates."""
        units = sum(size for name, size in inputs.items() if name not in adapted)
        if modulation not in adapted and not config.trains_clip:
            # an output and a norm, which compiled blocks compute again; CLIP's vector needs a gradient
            units += 1 if config.parallel.compiles(has_gpu=True) else 2
        return int(units * _unit(config) * tokens)

    if index >= config.model.depth:
        inputs = {"linear1": 1, "linear2": 1 + ratio}
        total = unsaved(_tokens(config), inputs, "modulation.lin")
        return UnsavedInputs(total, (0, total))
    attention, mlp = 0, []
    for stream, tokens in (("txt", config.data.text_length), ("img", config.image_tokens)):
        modulation = f"{stream}_mod.lin"
        inputs = {f"{stream}_attn.qkv": 1, f"{stream}_attn.proj": 1}
        attention += unsaved(tokens, inputs, modulation)
        inputs = {f"{stream}_mlp.0": 1, f"{stream}_mlp.2": ratio}
        mlp.append(unsaved(tokens, inputs, modulation))
    return UnsavedInputs(attention + sum(mlp), (0, mlp[0], sum(mlp)))


@lru_cache(maxsize=16)  # a plan asks for each block, at each micro batch that it tries
def _adapted(model: ModelConfig, adapter: AdapterConfig) -> tuple[frozenset[str], ...]:
    """Return the names of the layers with adapters in each block, without the block's."""
    found = [set[str]() for _ in range(model.num_blocks)]
    for layer in block_layers(model, adapter):
        found[block_number(layer.name, model)].add(layer.name.split(".", 2)[2])
    return tuple(map(frozenset, found))


BUFFERS = 2
"""Blocks whose weights are on the device at the same time: the one that computes, and the next."""
ALIGNMENT = 256
"""Bytes: each tensor of a block begins at a multiple of it, as an allocation of its own would."""


def offloaded_blocks(config: RunConfig) -> list[int]:
    """Return the numbers of the blocks, double blocks first, whose frozen weights are in host memory.

    They are spread evenly: the copies of one hide behind the blocks between.
    """
    num_blocks = config.model.num_blocks
    count = config.parallel.offload_blocks
    return [i for i in range(num_blocks) if (i + 1) * count // num_blocks > i * count // num_blocks]


def aligned(num_bytes: int) -> int:
    """Return the bytes up to the next tensor's begin."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def block_bytes(config: RunConfig) -> tuple[int, int]:
    """Return the bytes of the frozen weights of a double and of a single block, in host memory."""
    one_of_each = config.model.one_of_each
    small = set(linear_layers(one_of_each)) if has_small_base(config) else set()
    width, sizes = BYTES[config.precision.compute], {"double_blocks": 0, "single_blocks": 0}
    for entry in entries(one_of_each):
        kind, (layer, _, matrix) = entry.name.partition(".")[0], entry.name.rpartition(".")
        if kind in sizes:
            own = 1 if matrix == "weight" and layer in small else width
            sizes[kind] += aligned(prod(entry.shape) * own)
    return sizes["double_blocks"], sizes["single_blocks"]


def host_sizes(config: RunConfig) -> list[int]:
    """Return the bytes of each block of ``config`` that is in host memory, in the order of the passes."""
    double, single = block_bytes(config)
    return [double if index < config.model.depth else single for index in offloaded_blocks(config)]


def buffer_sizes(sizes: Sequence[int]) -> list[int]:
    """Return the bytes of each buffer on the device, in turn used by blocks of ``sizes`` bytes."""
    return [max(sizes[first::BUFFERS]) for first in range(min(BUFFERS, len(sizes)))]


def copied_bytes(sizes: Sequence[int]) -> int:
    """Return the bytes that a forward and a backward pass copy to the device, of blocks of ``sizes`` bytes.

    A pass begins with the blocks that the one before ended with.
    """
    return sum(sizes[BUFFERS:]) + sum(sizes[:-BUFFERS])
