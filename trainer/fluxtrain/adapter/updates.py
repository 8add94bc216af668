"""The updates of an adapter's layers: low-rank ones and Kronecker products."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Magnitude:
    """The norms that DoRA gives the rows of the updated weight."""

    values: Float[Tensor, " rows"]
    is_change: bool = False
    """Whether they are changes of the norms of the weight's own rows, as in checkpoints."""

    def of(self, weight: Float[Tensor, "rows in"]) -> Float[Tensor, " rows"]:
        """Return the norms, in float32, if ``weight`` is the one that is updated."""
        values = self.values.float()
        return values + weight.float().norm(dim=1) if self.is_change else values

    def rows(self, first: int, end: int) -> Magnitude:
        """Return the norms of the rows ``first`` to ``end`` of these."""
        return replace(self, values=self.values[first:end])


@dataclass(frozen=True)
class RowBlock:
    """The update of some rows of a layer's weight, from ``first`` on: scale × up × down."""

    first: int
    down: Float[Tensor, "rank in"]
    up: Float[Tensor, "rows rank"]
    scale: float
    """alpha / rank."""
    magnitude: Magnitude | None = None
    """Norms of the rows of the sum of weight and update (DoRA); None: the sum stays as it is."""

    @property
    def rank(self) -> int:
        """Return the rank."""
        return len(self.down)

    @property
    def end(self) -> int:
        """Return the row after the last one."""
        return self.first + len(self.up)

    def folded(self) -> RowBlock:
        """Return the same update with scale 1: alpha equals the rank."""
        return self if self.scale == 1 else replace(self, up=self.up.float() * self.scale, scale=1)

    def rows(self, first: int, end: int) -> RowBlock:
        """Return the part of the update for the rows ``first`` to ``end`` of the layer."""
        begin, last = first - self.first, end - self.first
        norms = None if self.magnitude is None else self.magnitude.rows(begin, last)
        return replace(self, first=first, up=self.up[begin:last], magnitude=norms)

    def product(self) -> Float[Tensor, "rows in"]:
        """Return the update in float32."""
        return self.scale * (self.up.float() @ self.down.float())

    def change(self, weight: Float[Tensor, "rows in"]) -> Float[Tensor, "rows in"]:
        """Return what the update adds to ``weight``, the piece's rows of it, in float32."""
        if self.magnitude is None:
            return self.product()
        total = weight.float() + self.product()
        norms = total.norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
        factors: Tensor = self.magnitude.of(weight) / norms
        return factors[:, None] * total - weight.float()


@dataclass(frozen=True)
class Update:
    """The update of a layer of ``outputs`` rows: pieces that do not overlap, in order."""

    outputs: int
    pieces: tuple[RowBlock, ...]

    @property
    def inputs(self) -> int:
        """Return the width of the layer's inputs."""
        return self.pieces[0].down.shape[1]

    @property
    def rank(self) -> int:
        """Return the most that the update's rank can be."""
        return sum(piece.rank for piece in self.pieces)

    @property
    def is_dora(self) -> bool:
        """Return whether some rows have magnitudes: what they add then depends on the weight."""
        return any(piece.magnitude is not None for piece in self.pieces)

    def without_magnitudes(self) -> Update:
        """Return the low-rank update alone."""
        return replace(self, pieces=tuple(replace(piece, magnitude=None) for piece in self.pieces))

    def change(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        """Return what the update adds to ``weight``, that of the layer, in float32."""
        change = torch.zeros(self.outputs, self.inputs)
        for piece in self.pieces:
            change[piece.first : piece.end] = piece.change(weight[piece.first : piece.end])
        return change

    def delta(self) -> Float[Tensor, "out in"]:
        """Return what the low-rank update adds to the layer's weight, in float32."""
        delta = torch.zeros(self.outputs, self.inputs)
        for piece in self.pieces:
            delta[piece.first : piece.end] = piece.product()
        return delta

    def norm(self) -> float:
        """Return the L2 norm of the low-rank update, without computing it."""
        squares = 0.0
        for piece in self.pieces:
            up, down = piece.up.float(), piece.down.float()
            squares += piece.scale**2 * ((up.T @ up) * (down @ down.T)).sum().item()
        return math.sqrt(max(squares, 0.0))

    def whole(self) -> RowBlock:
        """Return the same update as one piece of all rows.

        Pieces with one and the same ``down`` become a piece of its rank. Of others the ranks add up: ``down``
        are stacked, and ``up`` is a block diagonal; the scale stays that of each piece, if they are equal.
        Raises ValueError if only some of the rows have magnitudes.
        """
        first, *others = self.pieces
        if not others and len(first.up) == self.outputs:
            return first
        pieces = self.pieces
        if any(piece.scale != first.scale for piece in pieces):
            pieces = tuple(piece.folded() for piece in pieces)
        is_shared = all(torch.equal(piece.down, first.down) for piece in others)
        downs = pieces[:1] if is_shared else pieces
        down = torch.cat([piece.down for piece in downs])
        up = torch.zeros(self.outputs, len(down), dtype=pieces[0].up.dtype)
        column = 0
        for piece in pieces:
            up[piece.first : piece.end, column : column + piece.rank] = piece.up
            column += 0 if is_shared else piece.rank
        return RowBlock(0, down, up, pieces[0].scale, self._magnitude())

    def _magnitude(self) -> Magnitude | None:
        """Return the magnitudes of all rows; None if there are none."""
        found = [piece.magnitude for piece in self.pieces if piece.magnitude is not None]
        if not found:
            return None
        values = torch.cat([each.values for each in found])
        if len(values) != self.outputs:
            raise ValueError(
                f"only {len(values)} of its {self.outputs} rows have a magnitude (DoRA)"
            )
        return Magnitude(values, found[0].is_change)

    def resized(self, rank: int) -> Update:
        """Return the closest update of ``rank`` or less, with scale 1: the largest singular values stay.

        Raises ValueError if rows have magnitudes, which are of the update as it is.
        """
        if self.is_dora:
            raise ValueError("its magnitudes (DoRA) belong to the update of its own rank")
        piece = self.whole().folded()
        up_basis, up_rest = torch.linalg.qr(piece.up.float())
        down_basis, down_rest = torch.linalg.qr(piece.down.float().T)
        left, values, right = torch.linalg.svd(up_rest @ down_rest.T)
        kept = min(rank, len(values))
        root = values[:kept].sqrt()
        up = up_basis @ (left[:, :kept] * root)
        down = (right[:kept] * root[:, None]) @ down_basis.T
        return Update(self.outputs, (RowBlock(0, down, up, 1.0),))


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
        return Update(self.outputs, (RowBlock(0, down, up, 1.0),))


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


AnyUpdate = Update | Product
Adapter = dict[str, AnyUpdate]
"""The updates by the layers' names in BFL's layout: ``double_blocks.0.img_attn.qkv``."""


def num_parameters(updates: Iterable[AnyUpdate]) -> int:
    """Return the number of values in the matrices of ``updates``."""
    count = 0
    for update in updates:
        if isinstance(update, Product):
            count += sum(tensor.numel() for tensor in update.tensors.values())
        else:
            for piece in update.pieces:
                norms = 0 if piece.magnitude is None else piece.magnitude.values.numel()
                count += piece.down.numel() + piece.up.numel() + norms
    return count


def is_dora(adapter: Mapping[str, AnyUpdate]) -> bool:
    """Return whether some layers of ``adapter`` have magnitudes (DoRA)."""
    return any(update.is_dora for update in low_rank(adapter).values())


def low_rank(adapter: Mapping[str, AnyUpdate]) -> dict[str, Update]:
    """Return the updates of ``adapter`` that are low-rank."""
    return {layer: update for layer, update in adapter.items() if isinstance(update, Update)}


def ranks_and_alphas(update: AnyUpdate) -> tuple[int, float]:
    """Return the rank and alpha of ``update`` as one piece; those of a product without a rank are 1."""
    if isinstance(update, Product):
        return update.rank or 1, update.alpha
    piece = update.without_magnitudes().whole()
    return piece.rank, piece.scale * piece.rank
