"""What adapters change in the moments of a block's passes."""

from __future__ import annotations

from dataclasses import replace

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.model.activations import BYTES
from fluxtrain.model.adapted_layers import BLOCKS, adapted_layers, adapters_of_blocks
from fluxtrain.model.block_moments import BlockMoments, Moment
from fluxtrain.model.flops import rows_of


def with_adapters(moments: BlockMoments, config: RunConfig, index: int) -> BlockMoments:
    """Return ``moments`` of block ``index``, double blocks first, with its adapters.

    They save A x. Blocks before the first one that has an adapter save nothing.
    """
    if config.adapter is None:
        return moments
    counts = adapters_of_blocks(config.model, config.adapter)
    if not any(counts[: index + 1]):
        return BlockMoments(0, 0, Moment(moments.forward.activations + moments.saved, 0), ())
    depth = config.model.depth
    prefix = f"{BLOCKS[0]}.{index}." if index < depth else f"{BLOCKS[1]}.{index - depth}."
    saved = sum(
        rows_of(layer.name, config.image_tokens, config.data.text_length)
        * layer.shapes["lora_A"][0]
        for layer in adapted_layers(config.model, config.adapter)
        if layer.name.startswith(prefix)
    )
    return replace(moments, saved=moments.saved + saved * BYTES[config.precision.compute])
