"""FLOPs of one sample: those of the matrix products, a multiplication or an addition each counted as one.

Element-wise operations are not counted, attention is counted in full (it is bidirectional), as by
``torch.utils.flop_counter``. d is the hidden width; a linear layer from i to o costs 2 i o per row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.model.layers import entries

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
    depth, singles = config.depth, config.depth_single_blocks
    again = {
        "double_blocks": recomputed_blocks(depth, fraction),
        "single_blocks": recomputed_blocks(singles, fraction, depth),
    }
    total = 0 if keeps_scores else (depth + singles) * scores
    total += sum(again.values()) * 2 * scores
    for layer in linears(config, image_tokens, text_tokens):
        kind, _, rest = layer.name.partition(".")
        total += layer.flops * (kind in again and int(rest.partition(".")[0]) < again[kind])
    return total


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
