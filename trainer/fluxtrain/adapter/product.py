"""Kronecker products that update linear layers (LoKr), whatever file they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from fluxtrain.adapter.update import Piece, Update

FACTORS = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")
"""LyCORIS' names of the tensors; w1 is ``w1_a`` times ``w1_b`` where it is of low rank, and so is w2."""


@dataclass(frozen=True)
class Product:
    """The update of a layer's weight: scale × w1 ⊗ w2."""

    tensors: Mapping[str, Tensor]
    """By LyCORIS' names."""
    scale: float
    """alpha / rank; 1 if neither factor is of low rank."""

    @property
    def first(self) -> Float[Tensor, "l m"]:
        """Return w1 in float32."""
        return self._factor("lokr_w1")

    @property
    def second(self) -> Float[Tensor, "k n"]:
        """Return w2 in float32."""
        return self._factor("lokr_w2")

    def _factor(self, name: str) -> Tensor:
        if name in self.tensors:
            return self.tensors[name].float()
        return self.tensors[f"{name}_a"].float() @ self.tensors[f"{name}_b"].float()

    @property
    def rank(self) -> int | None:
        """Return the rank of the factors of low rank, None if there is none."""
        lows = (self.tensors[name] for name in ("lokr_w1_b", "lokr_w2_b") if name in self.tensors)
        return next((len(low) for low in lows), None)

    @property
    def alpha(self) -> float:
        """Return alpha, as LyCORIS writes it."""
        return self.scale * (self.rank or 1)

    @property
    def outputs(self) -> int:
        """Return the rows of the layer's weight."""
        return self._size(0)

    @property
    def inputs(self) -> int:
        """Return the width of the layer's inputs."""
        return self._size(1)

    def _size(self, dim: int) -> int:
        sizes = 1
        for name in ("lokr_w1", "lokr_w2"):
            low = f"{name}_{'ab'[dim]}"
            sizes *= self.tensors[name if name in self.tensors else low].shape[dim]
        return sizes

    def change(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        """Return what the update adds to ``weight``, whatever that is."""
        return self.delta()

    def delta(self) -> Float[Tensor, "out in"]:
        """Return what the update adds to the layer's weight, in float32."""
        return torch.kron(self.first, self.second) * self.scale

    def norm(self) -> float:
        """Return the L2 norm of the update, without computing it."""
        norm = self.first.norm() * self.second.norm() * abs(self.scale)
        return float(norm.item())

    def resized(self, rank: int) -> Update:
        """Return the low-rank update of ``rank`` or less with the largest singular values; scale 1.

        The singular values of a product are those of its factors, each times each.
        """
        (left1, values1, right1), (left2, values2, right2) = (
            torch.linalg.svd(factor, full_matrices=False) for factor in (self.first, self.second)
        )
        values = torch.outer(values1, values2).flatten() * self.scale
        kept = values.topk(min(rank, len(values))).indices
        one, two = kept // len(values2), kept % len(values2)
        root = values[kept].sqrt()
        up = torch.einsum("lr,kr->lkr", left1[:, one], left2[:, two]).flatten(0, 1) * root
        down = torch.einsum("rm,rn->rmn", right1[one], right2[two]).flatten(1) * root[:, None]
        return Update(self.outputs, (Piece(0, down, up, 1.0),))


def product_of(module: str, tensors: Mapping[str, Tensor], alpha: float | None) -> Product:
    """Return the update with ``tensors`` by LyCORIS' names; ValueError if they do not fit.

    ``alpha`` is None if the file has none: the scale is 1 then.
    """
    for name in ("lokr_w1", "lokr_w2"):
        if tensors.keys() & {name, f"{name}_a", f"{name}_b"} not in (
            {name},
            {f"{name}_a", f"{name}_b"},
        ):
            raise ValueError(f"{module} has no {name}, or two")
    if any(tensor.dim() != 2 or not tensor.numel() for tensor in tensors.values()):
        raise ValueError(f"{module} has a factor that is no matrix")
    for name in ("lokr_w1", "lokr_w2"):
        pair = tensors.get(f"{name}_a"), tensors.get(f"{name}_b")
        if pair[0] is not None and pair[1] is not None and pair[0].shape[1] != len(pair[1]):
            shapes = f"{list(pair[0].shape)} and {list(pair[1].shape)}"
            raise ValueError(f"{module} has matrices of shapes {shapes}, which have no product")
    rank = Product(tensors, 1.0).rank
    return Product(tensors, 1.0 if alpha is None or rank is None else alpha / rank)
