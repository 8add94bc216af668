"""Memory of the activations that forward saves for backward, counted from the tensors in model/blocks.py.

They are those of a GPU, where blocks are compiled unless the config says otherwise. The tests compare the
counts with measured ones. h is the hidden width, r the MLP's width over h; one unit is
a tensor of the block's tokens, h wide, in the compute dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.model import TIMESTEP_DIM, ModelConfig
from fluxtrain.model.recomputation import recomputed_blocks

_FLOAT32 = 4
BYTES = {"bfloat16": 2, "float32": 4}
"""Bytes of one number in each precision."""


@dataclass(frozen=True)
class Saved:
    """Bytes that one block saves: per token, and per sample for any number of tokens."""

    per_token: int
    per_sample: int

    def bytes(self, tokens: int) -> int:
        """Return the bytes for one sample of ``tokens`` tokens."""
        return self.per_token * tokens + self.per_sample


def activation_bytes(config: RunConfig) -> tuple[int, int]:
    """Return the bytes saved per sample until backward, and those of the block that is being recomputed.

    The second is 0 without activation checkpointing.
    """
    tokens = config.image_tokens + config.data.text_length
    kept = live = 0
    for saved, num_blocks, recomputed in _kinds(config):
        inputs = tokens * config.model.hidden_size * BYTES[config.precision.compute]
        kept += (num_blocks - recomputed) * saved.bytes(tokens) + recomputed * inputs
        if recomputed:
            live = max(live, saved.bytes(tokens))
    return kept + first_layers_bytes(config) + last_layers_bytes(config), live


def _kinds(config: RunConfig) -> list[tuple[Saved, int, int]]:
    """Return for each kind of block: the bytes of one, the number of blocks, how many are recomputed."""
    model, fraction = config.model, config.parallel.activation_checkpointing
    double, single = saved_by_double_block(config), saved_by_single_block(config)
    return [
        (double, model.depth, recomputed_blocks(model.depth, fraction)),
        (
            single,
            model.depth_single_blocks,
            recomputed_blocks(model.depth_single_blocks, fraction, model.depth),
        ),
    ]


def saved_by_double_block(config: RunConfig) -> Saved:
    """Return the bytes that a double-stream block saves.

    Eager 13 + 2r units: the block's input, norm and modulated input of attention and MLP (6), rotated
    q and k, v, attended (4), input and output of the projection (2), the MLP's output (1), and its
    hidden layer before and after GELU (2r). Compiled: norms are recomputed instead of saved.
    """
    width = BYTES[config.precision.compute]
    hidden, ratio = config.model.hidden_size, config.model.mlp_ratio
    if config.parallel.compiles(has_gpu=True):
        units, extra = 10 + 2 * ratio, 3.0 * width * hidden  # q, k and v as projected
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
    tokens = config.image_tokens + config.data.text_length
    return _FLOAT32 * config.model.num_heads * tokens * tokens


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
    normalised = (
        2.0 if config.adapter is None else 0.0
    )  # frozen norms do not need q and k after them
    if config.precision.compute == "float32":
        return (3.0 + normalised) * _FLOAT32 * hidden  # the projection: q, k, v
    return (2.0 + normalised) * _FLOAT32 * hidden  # q and k in float32


def _per_head(model: ModelConfig) -> int:
    return (
        model.num_heads * _FLOAT32
    )  # the norms of q and k, and attention, save one number per head


def first_layers_bytes(config: RunConfig) -> int:
    """Return the bytes that the embeddings save for one sample, among them the model's inputs."""
    width, model = BYTES[config.precision.compute], config.model
    embedded = (
        config.image_tokens * model.in_channels + config.data.text_length * model.context_in_dim
    )
    vectors = model.vec_in_dim + TIMESTEP_DIM + 10 * model.hidden_size
    return (embedded + vectors) * width


def last_layers_bytes(config: RunConfig) -> int:
    """Return the bytes that the last layer and the loss save for one sample."""
    width, model = BYTES[config.precision.compute], config.model
    image, text = config.image_tokens, config.data.text_length
    last = (image + text) * model.hidden_size + 2 * image * model.hidden_size
    loss = 2 * image * model.in_channels * _FLOAT32
    return last * width + loss
