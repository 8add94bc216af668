"""Which blocks have their frozen weights in host memory, and the bytes of these; without torch."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.model.activations import BYTES
from fluxtrain.model.adapted_layers import has_small_base, linear_layers
from fluxtrain.model.tensor_names import entries

BUFFERS = 2
"""Blocks whose weights are on the device at the same time: the one that computes, and the next."""
ALIGNMENT = 256
"""Bytes: each tensor of a block begins at a multiple of it, as an allocation of its own would."""


def offloaded_blocks(config: RunConfig) -> list[int]:
    """Return the numbers of the blocks, double blocks first, whose frozen weights are in host memory.

    They are spread evenly: the copies of one hide behind the blocks between.
    """
    num_blocks = config.model.depth + config.model.depth_single_blocks
    count = config.parallel.offload_blocks
    return [i for i in range(num_blocks) if (i + 1) * count // num_blocks > i * count // num_blocks]


def aligned(num_bytes: int) -> int:
    """Return the bytes up to the next tensor's begin."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def block_bytes(config: RunConfig) -> tuple[int, int]:
    """Return the bytes of the frozen weights of a double and of a single block, in host memory."""
    one_of_each = config.model.model_copy(update={"depth": 1, "depth_single_blocks": 1})
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
