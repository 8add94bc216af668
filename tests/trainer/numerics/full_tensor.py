"""A sharded tensor as a whole."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Return ``tensor`` unsharded on every rank; every rank must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
