"""FLOPs of one sample if adapters are trained: frozen weights need no gradient of their own.

As in flops.py: matrix products only, and those of attention in full.
"""

from __future__ import annotations

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.model.adapted_layers import BLOCKS, AdaptedLayer, block_layers
from fluxtrain.model.clip_cost import clip_flops
from fluxtrain.model.flops import Linear, forward_flops, linears, rows_of, training_flops


def run_flops(config: RunConfig, image_tokens: int | None = None) -> int:
    """Return the FLOPs of forward and backward for one sample of ``config``, without recomputation.

    It has ``image_tokens``, or those of the largest image.
    """
    image_tokens = image_tokens or config.image_tokens
    sizes = config.model, image_tokens, config.data.text_length
    if config.adapter is None:
        return training_flops(*sizes)
    layers = block_layers(config.model, config.adapter)
    first = 0 if config.trains_clip else min(_block_of(config, layer.name) for layer in layers)
    tokens = image_tokens + config.data.text_length
    attention = 4 * tokens * tokens * config.model.hidden_size
    trained_blocks = config.model.depth + config.model.depth_single_blocks - first
    adapted = {layer.name for layer in layers}
    passing = {
        layer.name.removesuffix(".weight"): layer.flops
        for layer in linears(*sizes)
        if _passes_gradient(config, layer, first, adapted)
    }
    adapters = sum(
        _adapter_flops(config, layer, image_tokens, layer.name in passing) for layer in layers
    )
    backward = sum(passing.values()) + 2 * trained_blocks * attention
    blocks = forward_flops(*sizes) + backward + adapters
    return blocks + clip_flops(config)


def norm_flops(config: RunConfig) -> int:
    """Return the FLOPs of the norms of DoRA's rows, which are computed once for a micro batch."""
    if config.adapter is None or not config.adapter.dora:
        return 0
    flops = 0
    for layer in block_layers(config.model, config.adapter):
        rank, outputs = layer.rank, layer.outputs
        crossed = 2 * outputs * layer.inputs * rank
        squared = 2 * rank * rank * (len(layer.splits) * layer.inputs + outputs)
        flops += crossed + squared
    return flops


def _adapter_flops(
    config: RunConfig, layer: AdaptedLayer, image_tokens: int, needs_input: bool
) -> int:
    """Return the FLOPs of the products of ``layer``'s adapter, and of their gradients.

    ``needs_input`` says whether the layer's input needs one too.
    """
    rows = rows_of(layer.name, image_tokens, config.data.text_length)
    if (factors := layer.kronecker) is not None:
        down, up = (rows * flops for flops in factors.flops)
    else:
        (stacked, inputs), (outputs, rank) = (layer.shapes[each] for each in ("lora_A", "lora_B"))
        down, up = 2 * rows * stacked * inputs, 2 * rows * outputs * rank
    return (3 if needs_input else 2) * down + 3 * up


def _passes_gradient(config: RunConfig, layer: Linear, first: int, adapted: set[str]) -> bool:
    """Return whether the input of ``layer`` needs a gradient, if ``first`` is the first block with adapters.

    That block's own input needs none, nor its first layers, unless the modulation between has an adapter.
    """
    if config.trains_clip and _depends_on_clip(layer.name):
        return True
    if layer.rows == 1 or layer.is_first:
        return False
    if not layer.name.startswith(BLOCKS):
        return True
    block, name = _block_of(config, layer.name), layer.name.removesuffix(".weight")
    if block == first and name.endswith((".linear1", "_attn.qkv")):
        return name.replace("linear1", "modulation.lin").replace("attn.qkv", "mod.lin") in adapted
    return block >= first


def _depends_on_clip(name: str) -> bool:
    """Return whether the input of layer ``name`` depends on the pooled vector."""
    return name.startswith((*BLOCKS, "vector_in", "final_layer"))


def _block_of(config: RunConfig, name: str) -> int:
    """Return the number of a layer's block, double blocks first."""
    blocks, number, *_ = name.split(".")
    return int(number) + (config.model.depth if blocks == "single_blocks" else 0)
