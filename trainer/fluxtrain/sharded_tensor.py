"""This rank's part of a sharded tensor, and sums over all parts."""

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
    mesh = tensor.device_mesh  # torch's own arithmetic reads tensors, which fake ones do not allow
    rows, *columns = tensor.shape
    block = -(-rows // mesh.get_group("dp_shard").size())
    return min(block * mesh.get_local_rank("dp_shard"), rows) * prod(columns)


def whole(tensor: Tensor) -> Tensor:
    """Return all parts of ``tensor`` as one; every rank must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def first_column(matrix: Tensor) -> Tensor:
    """Return a vector with a number for each row of ``matrix``, divided as its rows are."""
    if not isinstance(matrix, DTensor):
        return matrix[:, 0]
    return DTensor.from_local(
        matrix.to_local()[:, 0],
        matrix.device_mesh,
        matrix.placements,
        run_check=False,
        shape=matrix.shape[:1],
        stride=(1,),
    )


def rows_like(matrix: Tensor, columns: int) -> Tensor:
    """Return float32 zeros in ``columns`` columns, divided by rows as ``matrix`` is."""
    local = torch.zeros(len(local_part(matrix)), columns, device=local_part(matrix).device)
    if not isinstance(matrix, DTensor):
        return local
    return DTensor.from_local(
        local,
        matrix.device_mesh,
        matrix.placements,
        run_check=False,
        shape=torch.Size((matrix.shape[0], columns)),
        stride=(columns, 1),
    )


def divided(values: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return this rank's rows of the vector ``values``, not copied, and a copy divided as ``like`` is.

    Without a division both are ``values``.
    """
    if not isinstance(like, DTensor):
        return values, values
    mesh = like.device_mesh  # torch's own arithmetic reads tensors, which fake ones do not allow
    block = -(-len(values) // mesh.get_group("dp_shard").size())
    own = values[block * mesh.get_local_rank("dp_shard") :][:block]
    copy = DTensor.from_local(
        own.clone(),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=values.shape,
        stride=(1,),
    )
    return own, copy


def sum_over_parts(value: Tensor, tensor: Tensor) -> Tensor:
    """Return ``value``, a number for each part of ``tensor``, summed over the parts, in place.

    Each part counts once, however many replicas there are. Every rank must call this.
    """
    if isinstance(tensor, DTensor):
        group = tensor.device_mesh.get_group("dp_shard")
        if group.size() > 1:
            dist.all_reduce(value, group=group)
    return value
