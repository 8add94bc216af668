"""The updates of an adapter's layers: low-rank ones, LyCORIS' other kinds, and those of biases and norms."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from fluxtrain.model.layers import HADAMARD_FACTORS


@dataclass(frozen=True)
class Magnitude:
    """The norms that DoRA gives the rows of the updated weight, or its columns."""

    values: Float[Tensor, " rows"]
    is_change: bool = False
    """Whether they are changes of the norms of the weight's own rows, as in checkpoints."""
    is_of_columns: bool = False
    """Whether each is of a column, as in LyCORIS' older files."""

    def of(self, weight: Float[Tensor, "rows in"]) -> Float[Tensor, " rows"]:
        """Return the norms, in float32, if ``weight`` is the one that is updated."""
        values = self.values.float()
        return values + weight.float().norm(dim=1) if self.is_change else values

    def applied(
        self, weight: Float[Tensor, "rows in"], delta: Float[Tensor, "rows in"]
    ) -> Float[Tensor, "rows in"]:
        """Return what is added to ``weight`` if its sum with ``delta`` gets these norms, in float32."""
        total, axis = weight.float() + delta, 0 if self.is_of_columns else 1
        norms = total.norm(dim=axis).clamp(min=torch.finfo(torch.float32).tiny)
        factors: Tensor = self.of(weight) / norms
        return factors.unsqueeze(axis) * total - weight.float()

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

    def swapped(self) -> RowBlock:
        """Return the update with the halves of its rows swapped."""
        norms = self.magnitude
        norms = norms and replace(norms, values=swapped(norms.values))
        return replace(self, up=swapped(self.up), magnitude=norms)

    def product(self) -> Float[Tensor, "rows in"]:
        """Return the update in float32."""
        return self.scale * (self.up.float() @ self.down.float())

    def change(self, weight: Float[Tensor, "rows in"]) -> Float[Tensor, "rows in"]:
        """Return what the update adds to ``weight``, the piece's rows of it, in float32."""
        if self.magnitude is None:
            return self.product()
        return self.magnitude.applied(weight, self.product())


def _of_rows(outputs: int, inputs: int, parts: Iterable[tuple[int, Tensor]]) -> Tensor:
    """Return a matrix with each of ``parts`` from its first row on, in float32, and zeros elsewhere."""
    matrix = torch.zeros(outputs, inputs)
    for first, rows in parts:
        matrix[first : first + len(rows)] = rows
    return matrix


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
        parts = ((each.first, each.change(weight[each.first : each.end])) for each in self.pieces)
        return _of_rows(self.outputs, self.inputs, parts)

    def delta(self) -> Float[Tensor, "out in"]:
        """Return what the low-rank update adds to the layer's weight, in float32."""
        parts = ((each.first, each.product()) for each in self.pieces)
        return _of_rows(self.outputs, self.inputs, parts)

    def norm(self) -> float:
        """Return the L2 norm of the low-rank update, without computing it."""
        squares = 0.0
        for piece in self.pieces:
            up, down = piece.up.double(), piece.down.double()
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


class _Dense:
    """An update that is computed whole."""

    def delta(self) -> Float[Tensor, "out in"]:
        """Return what the update adds to the layer's weight, in float32."""
        raise NotImplementedError

    def change(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        """Return what the update adds to ``weight``, whatever that is."""
        return self.delta()

    def norm(self) -> float:
        """Return the L2 norm of the update."""
        return float(self.delta().norm().item())

    def resized(self, rank: int) -> Update:
        """Return the low-rank update of ``rank`` or less with the largest singular values; scale 1."""
        return truncated(self.delta(), rank)


@dataclass(frozen=True)
class Product(_Dense):
    """The update of a layer's weight: scale × w1 ⊗ w2 (LoKr)."""

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

    def delta(self) -> Float[Tensor, "out in"]:
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


DIFFERENCE = "diff"
"""LyCORIS' name of a whole update."""


@dataclass(frozen=True)
class Hadamard(_Dense):
    """The update of a layer's weight: scale × (w1_a w1_b) ⊙ (w2_a w2_b), values times values (LoHa)."""

    tensors: Mapping[str, Tensor]
    """By LyCORIS' names."""
    scale: float
    """alpha / rank."""

    @property
    def rank(self) -> int:
        """Return the rank of each of both products; that of the update may be its square."""
        return len(self.tensors["hada_w1_b"])

    @property
    def alpha(self) -> float:
        """Return alpha, as LyCORIS writes it."""
        return self.scale * self.rank

    @property
    def outputs(self) -> int:
        return len(self.tensors["hada_w1_a"])

    @property
    def inputs(self) -> int:
        return self.tensors["hada_w1_b"].shape[1]

    def delta(self) -> Float[Tensor, "out in"]:
        one, two, three, four = (self.tensors[name].float() for name in HADAMARD_FACTORS)
        return self.scale * ((one @ two) * (three @ four))


@dataclass(frozen=True)
class Difference(_Dense):
    """The update of a layer's weight as it is."""

    tensors: Mapping[str, Tensor]
    """By LyCORIS' name."""
    scale = 1.0
    rank = None
    alpha = None

    @property
    def outputs(self) -> int:
        return len(self.tensors[DIFFERENCE])

    @property
    def inputs(self) -> int:
        return self.tensors[DIFFERENCE].shape[1]

    def delta(self) -> Float[Tensor, "out in"]:
        return self.tensors[DIFFERENCE].float()


Matrix = Product | Hadamard | Difference
"""LyCORIS' updates that are not of low rank."""


@dataclass(frozen=True)
class Patch:
    """The update of some rows of a layer's weight, from ``first`` on."""

    first: int
    matrix: Matrix | Update
    magnitude: Magnitude | None = None
    is_swapped: bool = False
    """Whether the halves of the rows are swapped, as in diffusers' last modulation."""

    @property
    def end(self) -> int:
        """Return the row after the last one."""
        return self.first + self.matrix.outputs

    def delta(self) -> Float[Tensor, "rows in"]:
        """Return the update without magnitudes, in float32."""
        delta = self.matrix.delta()
        return swapped(delta) if self.is_swapped else delta

    def change(self, weight: Float[Tensor, "rows in"]) -> Float[Tensor, "rows in"]:
        """Return what the update adds to ``weight``, the patch's rows of it, in float32."""
        delta = self.delta()
        return delta if self.magnitude is None else self.magnitude.applied(weight, delta)


@dataclass(frozen=True)
class Patches(_Dense):
    """The update of a layer of ``outputs`` rows by patches that do not overlap, in order."""

    outputs: int
    patches: tuple[Patch, ...]

    @property
    def inputs(self) -> int:
        return self.patches[0].matrix.inputs

    @property
    def is_dora(self) -> bool:
        """Return whether some rows or columns have magnitudes."""
        return any(patch.magnitude is not None for patch in self.patches)

    def change(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        """Return what the update adds to ``weight``, that of the layer, in float32."""
        parts = ((each.first, each.change(weight[each.first : each.end])) for each in self.patches)
        return _of_rows(self.outputs, self.inputs, parts)

    def delta(self) -> Float[Tensor, "out in"]:
        """Return the update without magnitudes, in float32."""
        parts = ((each.first, each.delta()) for each in self.patches)
        return _of_rows(self.outputs, self.inputs, parts)

    def norm(self) -> float:
        """Return the L2 norm of the update without magnitudes."""
        return math.hypot(*(patch.matrix.norm() for patch in self.patches))


@dataclass(frozen=True)
class Vector:
    """The update of a bias, or of the scale of a norm."""

    values: Float[Tensor, " out"]
    is_new: bool = False
    """Whether these are the new values, instead of their change."""
    inputs = None

    @property
    def outputs(self) -> int:
        """Return the number of values."""
        return len(self.values)

    def change(self, weight: Float[Tensor, " out"]) -> Float[Tensor, " out"]:
        """Return what the update adds to ``weight``, in float32."""
        return self.values.float() - weight.float() if self.is_new else self.values.float()

    def delta(self) -> Float[Tensor, " out"]:
        """Return what the update adds; nothing is known of it if the values are new."""
        return torch.zeros(self.outputs) if self.is_new else self.values.float()

    def norm(self) -> float:
        """Return the L2 norm of what the update adds."""
        return float(self.delta().norm().item())

    def resized(self, rank: int) -> Vector:
        """Return the same update, which has no rank."""
        return self


def swapped(rows: Tensor) -> Tensor:
    """Return ``rows`` with their halves swapped."""
    return torch.cat(rows.chunk(2)[::-1])


_EXTRA = 16
"""Columns beyond the rank with which the largest singular vectors are found."""
_ITERATIONS = 4


def truncated(difference: Float[Tensor, "out in"], rank: int) -> Update:
    """Return the update with the largest singular values; the same in each call."""
    count = min(rank + _EXTRA, *difference.shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        left, values, right = torch.svd_lowrank(difference, q=count, niter=_ITERATIONS)
    kept = min(rank, len(values))
    root = values[:kept].sqrt()
    down, up = (right[:, :kept] * root).T.contiguous(), left[:, :kept] * root
    return Update(len(difference), (RowBlock(0, down, up, 1.0),))


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


_MAX_VALUES = 1 << 28
"""Of a Hadamard product, which is computed whole; the largest of FLUX.1's has a quarter of that."""


def hadamard_of(module: str, tensors: Mapping[str, Tensor], alpha: float | None) -> Hadamard:
    """Return the update with ``tensors`` by LyCORIS' names; ValueError if they do not fit."""
    missing = [name for name in HADAMARD_FACTORS if name not in tensors]
    if missing:
        raise ValueError(f"{module} has no {missing[0]}")
    shapes = [tuple(tensors[name].shape) for name in HADAMARD_FACTORS]
    if any(len(shape) != 2 or 0 in shape for shape in shapes):
        raise ValueError(f"{module} has a factor that is no matrix")
    (rows, rank), (rank_, columns), *_ = shapes
    if rows * columns > _MAX_VALUES:
        raise ValueError(
            f"{module} has {rows} rows and {columns} columns, at most {_MAX_VALUES} values"
        )
    if rank != rank_ or shapes[2:] != [(rows, rank), (rank, columns)]:
        raise ValueError(f"{module} has matrices of shapes {shapes}, which have no product")
    return Hadamard(tensors, 1.0 if alpha is None else alpha / rank)


AnyUpdate = Update | Matrix | Patches | Vector
Adapter = dict[str, AnyUpdate]
"""The updates by the layers' names in BFL's layout, ``double_blocks.0.img_attn.qkv``; those of biases and
norms by the tensors' names, ``double_blocks.0.img_attn.qkv.bias``."""


def kind_of(update: AnyUpdate) -> str:
    """Return the name of the algorithm of ``update``."""
    if isinstance(update, Patches):
        kinds = {kind_of(patch.matrix): None for patch in update.patches}
        return " and ".join(kinds) + (" with magnitudes (DoRA)" if update.is_dora else "")
    if isinstance(update, Update):
        return "LoRA with magnitudes (DoRA)" if update.is_dora else "LoRA"
    names = {
        "lokr": "Kronecker products (LoKr)",
        "loha": "Hadamard products (LoHa)",
        "full": "whole differences",
    }
    return names.get(lycoris_name(update), "values of biases and norms")


def lycoris_name(update: AnyUpdate) -> str:
    """Return LyCORIS' name of the algorithm of ``update``."""
    if isinstance(update, Patches):
        return lycoris_name(update.patches[0].matrix)
    return {Product: "lokr", Hadamard: "loha", Difference: "full"}.get(type(update), "lora")


def num_parameters(updates: Iterable[AnyUpdate]) -> int:
    """Return the number of values in the matrices of ``updates``."""
    return sum(tensor.numel() for update in updates for tensor in _tensors(update))


def _tensors(update: AnyUpdate) -> Iterator[Tensor]:
    if isinstance(update, Vector):
        yield update.values
    elif isinstance(update, Matrix):
        yield from update.tensors.values()
    elif isinstance(update, Patches):
        for patch in update.patches:
            yield from _tensors(patch.matrix)
            if patch.magnitude is not None:
                yield patch.magnitude.values
    else:
        for piece in update.pieces:
            yield from (piece.down, piece.up)
            if piece.magnitude is not None:
                yield piece.magnitude.values


def is_dora(adapter: Mapping[str, AnyUpdate]) -> bool:
    """Return whether some layers of ``adapter`` have magnitudes (DoRA)."""
    return any(isinstance(each, Update | Patches) and each.is_dora for each in adapter.values())


def low_rank(adapter: Mapping[str, AnyUpdate]) -> dict[str, Update]:
    """Return the updates of ``adapter`` that are low-rank."""
    return {layer: update for layer, update in adapter.items() if isinstance(update, Update)}


def ranks_and_alphas(update: AnyUpdate) -> tuple[int, float]:
    """Return the rank and alpha of ``update`` as one piece; those without a rank are 1."""
    if isinstance(update, Vector):
        return 1, 1.0
    if isinstance(update, Patches):
        return ranks_and_alphas(update.patches[0].matrix)
    if isinstance(update, Update):
        piece = update.without_magnitudes().whole()
        return piece.rank, piece.scale * piece.rank
    return update.rank or 1, update.alpha or 1.0
