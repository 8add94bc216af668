"""Low-rank updates of the blocks' linear layers, whatever file they come from."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """The update of some rows of a layer's weight, from ``first`` on: scale × up × down."""

    first: int
    down: Float[Tensor, "rank in"]
    up: Float[Tensor, "rows rank"]
    scale: float
    """alpha / rank."""

    @property
    def rank(self) -> int:
        """Return the rank."""
        return len(self.down)

    @property
    def end(self) -> int:
        """Return the row after the last one."""
        return self.first + len(self.up)

    def folded(self) -> Piece:
        """Return the same update with scale 1: alpha equals the rank."""
        return self if self.scale == 1 else replace(self, up=self.up.float() * self.scale, scale=1)

    def rows(self, first: int, end: int) -> Piece:
        """Return the part of the update for the rows ``first`` to ``end`` of the layer."""
        return replace(self, first=first, up=self.up[first - self.first : end - self.first])

    def product(self) -> Float[Tensor, "rows in"]:
        """Return the update in float32."""
        return self.scale * (self.up.float() @ self.down.float())


@dataclass(frozen=True)
class Update:
    """The update of a layer of ``outputs`` rows: pieces that do not overlap, in order."""

    outputs: int
    pieces: tuple[Piece, ...]

    @property
    def inputs(self) -> int:
        """Return the width of the layer's inputs."""
        return self.pieces[0].down.shape[1]

    @property
    def rank(self) -> int:
        """Return the most that the update's rank can be."""
        return sum(piece.rank for piece in self.pieces)

    def delta(self) -> Float[Tensor, "out in"]:
        """Return what the update adds to the layer's weight, in float32."""
        delta = torch.zeros(self.outputs, self.inputs)
        for piece in self.pieces:
            delta[piece.first : piece.end] = piece.product()
        return delta

    def norm(self) -> float:
        """Return the L2 norm of the update, without computing it."""
        squares = 0.0
        for piece in self.pieces:
            up, down = piece.up.float(), piece.down.float()
            squares += piece.scale**2 * ((up.T @ up) * (down @ down.T)).sum().item()
        return math.sqrt(max(squares, 0.0))

    def whole(self) -> Piece:
        """Return the same update as one piece of all rows.

        Pieces with one and the same ``down`` become a piece of its rank. Of others the ranks add up: ``down``
        are stacked, and ``up`` is a block diagonal; the scale stays that of each piece, if they are equal.
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
        return Piece(0, down, up, pieces[0].scale)

    def resized(self, rank: int) -> Update:
        """Return the closest update of ``rank`` or less, with scale 1: the largest singular values stay."""
        piece = self.whole().folded()
        up_basis, up_rest = torch.linalg.qr(piece.up.float())
        down_basis, down_rest = torch.linalg.qr(piece.down.float().T)
        left, values, right = torch.linalg.svd(up_rest @ down_rest.T)
        kept = min(rank, len(values))
        root = values[:kept].sqrt()
        up = up_basis @ (left[:, :kept] * root)
        down = (right[:kept] * root[:, None]) @ down_basis.T
        return Update(self.outputs, (Piece(0, down, up, 1.0),))
