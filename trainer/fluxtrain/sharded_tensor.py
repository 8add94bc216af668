"""This rank's part of a sharded tensor, and sums over all parts."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> bool:
    """Return whether ranks may have different parts of ``tensor``."""
    return isinstance(tensor, DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of ``tensor``, not copied."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return all parts of ``tensor`` as one; every rank must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sum_over_parts(value: Tensor, tensor: Tensor) -> Tensor:
    """Return ``value``, a number for each part of ``tensor``, summed over the parts, in place.

    Each part counts once, however many replicas there are. Every rank must call this.
    """
    if isinstance(tensor, DTensor):
        group = tensor.device_mesh.get_group("dp_shard")
        if group.size() > 1:
            dist.all_reduce(value, group=group)
    return value
