"""A vector that all ranks compute with, of which each rank saves and loads its rows."""

from __future__ import annotations

import torch
from torch import Tensor

from fluxtrain.sharded_tensor import divided, local_part, whole


class RowVector:
    """``values``, the same on all ranks, and ``rows``, divided as the parameters are."""

    def __init__(self, size: int, like: Tensor, dtype: torch.dtype) -> None:
        """Allocate ``size`` zeros, divided by rows as ``like`` is."""
        self.values = torch.zeros(size, dtype=dtype, device=local_part(like).device)
        """What ranks compute with."""
        self._own, self.rows = divided(self.values, like)

    def save(self) -> None:
        """Write this rank's values into its rows."""
        if self.rows is not self.values:
            local_part(self.rows).copy_(self._own)

    def load(self) -> None:
        """Read the values from the rows of all ranks; every rank must call this."""
        if self.rows is not self.values:
            self.values.copy_(whole(self.rows))
