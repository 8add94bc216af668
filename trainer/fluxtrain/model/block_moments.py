"""The moments of a block's passes at which most memory is in use, counted from the tensors in blocks.py.

The tests compare the counts with measured ones. h is the hidden width, r the MLP's width over h; one unit is
a tensor of the tokens in question, h wide, in the compute dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.model.activations import (
    BYTES,
    Saved,
    saved_by_double_block,
    saved_by_single_block,
    scores_bytes,
)

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
    moments = [
        # gradients of both outputs and of GELU's output, and the last layer's weight gradient
        Moment(int(both + ratio * text), int(ratio * square)),
        Moment(int(both + ratio * image - mlp * text), int(3 * ratio * square)),
        # attention, whose output's projections are freed too: the gradients of q, k and v
        Moment(int((3 - mlp) * both), int((4 * ratio + 2) * square)),
    ]
    forward = held * both
    if scores := scores_bytes(
        config
    ):  # their softmax, in both passes, or the end of the forward pass
        forward = max(forward, scores - 8 * both) if is_float32 else max(10 * both, scores)
        moments.append(Moment(2 * scores - 12 * both, int((4 * ratio + 2) * square)))
    if _rounds_eagerly(config):
        peaks = _ROUNDING[config.precision.fp8, "double"]
        forward = max(forward, _copies(config, peaks[0]))
        moments.append(Moment(_copies(config, peaks[1]), int(ratio * square)))
    return _of(config, saved_by_double_block(config), Moment(forward, 0), moments)


def single_block_moments(config: RunConfig) -> BlockMoments:
    """Return the moments of a single-stream block.

    Forward: GELU's output beside its concatenation with attention's, and the projection. Backward: the
    gradients of the concatenation, of GELU's input, of q, k and v, after the last projection's inputs
    are freed; later the gradient of the first projection's output.
    """
    unit, hidden, ratio = _unit(config), config.model.hidden_size, config.model.mlp_ratio
    tokens, square = (config.image_tokens + config.data.text_length) * unit, hidden * hidden
    saved = saved_by_single_block(config)
    moments = [
        Moment(int((3 + ratio) * tokens), int((1 + ratio) * square)),
        Moment(
            int((8 + ratio) * tokens) - saved.bytes(_tokens(config)), int((4 + 2 * ratio) * square)
        ),
    ]
    forward = int((ratio + 2) * tokens)
    if scores := scores_bytes(config):  # as in a double-stream block
        is_float32 = config.precision.compute == "float32"
        held, beside, freed = (1, -2, 0) if is_float32 else (5, 2, 8)
        forward = max(forward + held * tokens, scores + beside * tokens)
        moments.append(Moment(2 * scores - freed * tokens, int((1 + ratio) * square)))
    if _rounds_eagerly(config):
        peaks = _ROUNDING[config.precision.fp8, "single"]
        forward = max(forward, _copies(config, peaks[0]))
        moments.append(Moment(_copies(config, peaks[1]), int((1 + ratio) * square)))
    return _of(config, saved, Moment(forward, 0), moments)


def _rounds_eagerly(config: RunConfig) -> bool:
    """Return whether rounding to fp8 makes copies; the compiler fuses it."""
    return config.precision.fp8 != "none" and not config.parallel.compiles(has_gpu=True)


def _copies(config: RunConfig, units: float) -> int:
    """Return the bytes of ``units`` per token, of two bytes each, whatever the compute dtype."""
    return int(units * _tokens(config) * config.model.hidden_size * 2)


def _of(config: RunConfig, saved: Saved, forward: Moment, backward: list[Moment]) -> BlockMoments:
    tokens = _tokens(config)
    return BlockMoments(saved.bytes(tokens), tokens * _unit(config), forward, tuple(backward))


def _tokens(config: RunConfig) -> int:
    return config.image_tokens + config.data.text_length


def _unit(config: RunConfig) -> int:
    """Return the bytes of one token."""
    return config.model.hidden_size * BYTES[config.precision.compute]
