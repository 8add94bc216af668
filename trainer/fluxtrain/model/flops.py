"""FLOPs of one sample: those of the matrix products, a multiplication or an addition each counted as one.

Element-wise operations are not counted, attention is counted in full (it is bidirectional), as by
``torch.utils.flop_counter``. d is the hidden width; a linear layer from i to o costs 2 i o per row.
"""

from __future__ import annotations

from math import prod

from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.model.tensor_names import entries

_EMBEDDERS = ("time_in", "vector_in", "guidance_in")
_INPUT_WEIGHTS = ("img_in.weight", "txt_in.weight", *(f"{e}.in_layer.weight" for e in _EMBEDDERS))


def forward_flops(config: ModelConfig, image_tokens: int, text_tokens: int) -> int:
    """Return the FLOPs of the forward pass for one sample."""
    tokens = image_tokens + text_tokens
    attention = 4 * tokens * tokens * config.hidden_size  # queries x keys and weights x values
    layers = _linear_flops(config, image_tokens, text_tokens).values()
    return sum(layers) + (config.depth + config.depth_single_blocks) * attention


def training_flops(config: ModelConfig, image_tokens: int, text_tokens: int) -> int:
    """Return the FLOPs of forward and backward for one sample, without recomputation.

    Each product costs two in the backward pass, one if the layer's input needs no gradient. A model
    without single blocks does not use its last text stream, whose few backward FLOPs are still counted.
    """
    layers = _linear_flops(config, image_tokens, text_tokens)
    inputs = sum(flops for name, flops in layers.items() if name in _INPUT_WEIGHTS)
    return 3 * forward_flops(config, image_tokens, text_tokens) - inputs


def _linear_flops(config: ModelConfig, image_tokens: int, text_tokens: int) -> dict[str, int]:
    """Return the FLOPs of each linear layer, by the name of its weight."""
    return {
        entry.name: 2 * prod(entry.shape) * _rows(entry.name, image_tokens, text_tokens)
        for entry in entries(config)
        if len(entry.shape) == 2
    }


def _rows(name: str, image_tokens: int, text_tokens: int) -> int:
    """Return the number of rows that the linear layer ``name`` is applied to."""
    if "mod" in name.lower() or name.startswith(_EMBEDDERS):
        return 1  # the vector of the sample
    if name.startswith("single_blocks"):
        return image_tokens + text_tokens
    return text_tokens if "txt_" in name else image_tokens
