"""What adapters change in the moments of a block's passes."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import chain, repeat

from fluxtrain.contract.run.adapter import AdapterConfig
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.model.activations import BYTES
from fluxtrain.model.adapted_layers import adapters_of_blocks, block_index, block_layers
from fluxtrain.model.block_moments import BlockMoments, Moment
from fluxtrain.model.flops import rows_of
from fluxtrain.model.unsaved_inputs import unsaved_inputs


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
    unsaved = unsaved_inputs(config, index)
    saved = moments.saved - unsaved.total + elements * BYTES[config.precision.compute]
    backward = tuple(
        replace(moment, activations=moment.activations + freed)
        for moment, freed in zip(moments.backward, chain(unsaved.freed, repeat(0)), strict=False)
    )
    return replace(moments, saved=saved, backward=backward)


@lru_cache(
    maxsize=16
)  # of all blocks at once: a plan asks for each, at each micro batch that it tries
def _saved_of_blocks(
    model: ModelConfig, adapter: AdapterConfig, image_tokens: int, text_length: int
) -> tuple[int, ...]:
    """Return the elements of A x of a sample in each block."""
    counts = [0] * (model.depth + model.depth_single_blocks)
    for layer in block_layers(model, adapter):
        rows = rows_of(layer.name, image_tokens, text_length)
        factors = layer.kronecker
        saved = layer.shapes["lora_A"][0] if factors is None else factors.saved
        saved += layer.outputs if layer.is_dora else 0
        counts[block_index(layer, model)] += rows * saved
    return tuple(counts)
