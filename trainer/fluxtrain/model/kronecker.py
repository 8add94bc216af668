"""The factors of a Kronecker product that updates a weight (LoKr), as LyCORIS divides it; without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fluxtrain.contract.run.adapter import LokrConfig
from fluxtrain.model.tensor_names import Shape


@dataclass(frozen=True)
class Kronecker:
    """Shapes of w1 and w2, whose Kronecker product has the shape of a weight; each may be of low rank."""

    first: Shape
    second: Shape
    rank: int
    is_first_low: bool
    """Whether w1 is a product of rank ``rank``."""
    is_second_low: bool

    @staticmethod
    def of(outputs: int, inputs: int, rank: int, config: LokrConfig) -> Kronecker:
        """Return the factors of a weight of ``outputs`` rows and ``inputs`` columns."""
        rows, columns = divided(outputs, config.factor), divided(inputs, config.factor)
        first, second = zip(rows, columns, strict=True)
        may_be_low = not config.full_matrix
        return Kronecker(
            first,
            second,
            rank,
            may_be_low and config.decompose_both and rank < max(first) / 2,
            may_be_low and rank < max(second) / 2,
        )

    @property
    def shapes(self) -> dict[str, Shape]:
        """Return the shapes of the parameters by LyCORIS' names."""
        found = dict[str, Shape]()
        factors = (("lokr_w1", self.first), ("lokr_w2", self.second))
        for (name, shape), is_low in zip(
            factors, (self.is_first_low, self.is_second_low), strict=True
        ):
            if is_low:
                found |= {f"{name}_a": (shape[0], self.rank), f"{name}_b": (self.rank, shape[1])}
            else:
                found[name] = shape
        return found

    def scale(self, alpha: float) -> float:
        """Return the factor of the product: 1 if no rank limits it."""
        return alpha / self.rank if self.is_first_low or self.is_second_low else 1.0

    @property
    def saved(self) -> int:
        """Return the numbers that a token's update keeps for the backward pass, besides its inputs."""
        columns, rows = self.first[1], self.second[0]
        return columns * (rows + (self.rank if self.is_second_low else 0))

    @property
    def flops(self) -> tuple[int, int]:
        """Return the FLOPs of a token's update: of the product with its inputs, and of what follows."""
        (rows1, columns1), (rows2, columns2) = self.first, self.second
        last = 2 * rows2 * columns1 * rows1
        if self.is_second_low:
            return 2 * columns1 * columns2 * self.rank, 2 * columns1 * self.rank * rows2 + last
        return 2 * columns1 * columns2 * rows2, last


def divided(count: int, factor: int) -> tuple[int, int]:
    """Return two numbers whose product is ``count``, the smaller first: as large as ``factor`` allows.

    A factor below 0 is no limit: the two are then as equal as they can be.
    """
    limit = math.isqrt(count) if factor < 0 else min(factor, math.isqrt(count))
    smaller = next(each for each in range(limit, 0, -1) if count % each == 0)
    return smaller, count // smaller
