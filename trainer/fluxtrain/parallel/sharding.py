"""Sharded tensors: this rank's part, the whole, and values divided as another tensor is.

An agent starts without this module: to import DTensor takes a second.
"""

from __future__ import annotations

from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> bool:
    """Return whether ranks may have different parts of ``tensor``."""
    return isinstance(tensor, DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of ``tensor``, not copied."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def values_before(tensor: Tensor) -> int:
    """Return the number of values of the whole ``tensor`` before this rank's part, which has whole rows."""
    if not isinstance(tensor, DTensor):
        return 0
    rows, *columns = tensor.shape
    before = rows_of_parts(tensor) * tensor.device_mesh.get_local_rank("dp_shard")
    return min(before, rows) * prod(columns)


def rows_of_parts(tensor: Tensor) -> int:
    """Return the rows of each part of ``tensor``, but for the last ones."""
    if not isinstance(tensor, DTensor):
        return len(tensor)
    # torch's own arithmetic reads tensors, which fake ones do not allow
    return -(-len(tensor) // tensor.device_mesh.get_group("dp_shard").size())


def whole(tensor: Tensor) -> Tensor:
    """Return all parts of ``tensor`` as one; every rank must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_of(part: Tensor, like: Tensor, shape: torch.Size | None = None) -> Tensor:
    """Return the tensor, divided as ``like`` is and by default of its shape, of which this rank has ``part``.

    An operator on a DTensor derives its sharding, which takes milliseconds for each shape; this does not.
    """
    if not isinstance(like, DTensor):
        return part
    shape = like.shape if shape is None else shape
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
    )


def first_column(matrix: Tensor) -> Tensor:
    """Return a vector with a number for each row of ``matrix``, divided as its rows are."""
    return whole_of(local_part(matrix)[:, 0], matrix, matrix.shape[:1])


def rows_like(matrix: Tensor, columns: int) -> Tensor:
    """Return float32 zeros in ``columns`` columns, divided by rows as ``matrix`` is."""
    local = torch.zeros(len(local_part(matrix)), columns, device=local_part(matrix).device)
    return whole_of(local, matrix, torch.Size((matrix.shape[0], columns)))


def divided(values: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return this rank's rows of the vector ``values``, not copied, and a copy divided as ``like`` is.

    Without a division both are ``values``.
    """
    if not isinstance(like, DTensor):
        return values, values
    mesh = like.device_mesh  # torch's own arithmetic reads tensors, which fake ones do not allow
    block = -(-len(values) // mesh.get_group("dp_shard").size())
    own = values[block * mesh.get_local_rank("dp_shard") :][:block]
    return own, whole_of(own.clone(), like, values.shape)


def sum_over_parts(value: Tensor, tensor: Tensor) -> Tensor:
    """Return ``value``, a number for each part of ``tensor``, summed over the parts, in place.

    Each part counts once, however many replicas there are. Every rank must call this.
    """
    return _reduced(value, tensor, dist.ReduceOp.SUM)


def largest_of_parts(values: Tensor, tensor: Tensor) -> Tensor:
    """Return the largest of each of ``values`` over the parts of ``tensor``, as `sum_over_parts`."""
    return _reduced(values, tensor, dist.ReduceOp.MAX)


def _reduced(value: Tensor, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    if isinstance(tensor, DTensor):
        group = tensor.device_mesh.get_group("dp_shard")
        if group.size() > 1:
            dist.all_reduce(value, operation, group)
    return value
