"""The image of a rank's training state: the bytes of its part of each tensor, one after the other.

FSDP2 divides the rows (dim 0) of each tensor into equal blocks, of which the last ones are shorter or empty.
So the place of each row follows from the shapes and the number of shards, and an image has no header.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from fluxtrain.sharded_tensor import local_part
from fluxtrain.staging import State


@dataclass(frozen=True)
class Rows:
    """The rows of one whole tensor."""

    count: int
    size: int
    """Bytes of one row."""


@dataclass(frozen=True)
class Shard:
    """Part ``index`` of ``count`` parts of the training state."""

    index: int
    count: int

    def range_of(self, rows: int) -> range:
        """Return the rows of a tensor with ``rows`` rows that are in this part."""
        block = -(-rows // self.count)
        return range(min(self.index * block, rows), min((self.index + 1) * block, rows))


@dataclass(frozen=True)
class Piece:
    """Bytes of one tensor that two parts have in common."""

    tensor: int
    """Position of the tensor in the training state."""
    offset: int
    """First byte in the image of the source."""
    start: int
    """First byte in the target's part of the tensor."""
    size: int


def rows_of(state: State) -> list[Rows]:
    """Return the rows of each tensor of ``state``, over all ranks."""
    return [Rows(t.shape[0], prod(t.shape[1:]) * t.dtype.itemsize) for t in state.values()]


def local_bytes(state: State, shard: Shard) -> list[Tensor]:
    """Return this rank's part of each tensor as bytes, not copied; the rank must hold ``shard``."""
    parts = [local_part(tensor) for tensor in state.values()]
    for part, rows in zip(parts, rows_of(state), strict=True):
        assert len(part) == len(shard.range_of(rows.count)), (part.shape, rows, shard)
    return [_flat(part).view(torch.uint8) for part in parts]


def _flat(tensor: Tensor) -> Tensor:
    """Return the contiguous ``tensor`` with one axis of stride 1, which one element may lack."""
    flat = tensor.view(-1)
    return flat.as_strided(flat.shape, (1,))


def offsets(tensors: Sequence[Rows], shard: Shard) -> list[int]:
    """Return the first byte of each tensor in the image of ``shard``, and the image's size."""
    sizes = (len(shard.range_of(rows.count)) * rows.size for rows in tensors)
    return list(accumulate(sizes, initial=0))


def pieces(tensors: Sequence[Rows], source: Shard, target: Shard) -> list[Piece]:
    """Return what ``target`` reads from the image of ``source``, in the order of the tensors."""
    found = []
    for number, (rows, begin) in enumerate(
        zip(tensors, offsets(tensors, source)[:-1], strict=True)
    ):
        has, needs = source.range_of(rows.count), target.range_of(rows.count)
        first, end = max(has.start, needs.start), min(has.stop, needs.stop)
        if first < end and rows.size:
            offset = begin + (first - has.start) * rows.size
            start = (first - needs.start) * rows.size
            found.append(Piece(number, offset, start, (end - first) * rows.size))
    return found
