"""Weights in bfloat16 without a copy in float32: each step rounds them stochastically.

The probability of rounding up is the fraction of the distance to the next bfloat16 number, so updates that
are far below that distance are taken on average. The random bits are a pure function of seed, step,
parameter, and place in the whole parameter: the same on any number of ranks, and in a run that resumes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fluxtrain.counter_hash import Range, key_of, random_numbers
from fluxtrain.sharded_tensor import local_part, values_before

_LOW_BITS = 0xFFFF
"""Bits of a float32 number that bfloat16 does not have."""
_HALF = 0x8000
"""Added to the bits of a float32 number, it rounds their high half to the nearest."""


@dataclass(frozen=True)
class Place:
    """Where this rank's part of a parameter is in the whole."""

    name: str
    begin: int
    count: int

    @classmethod
    def of(cls, name: str, weight: Tensor) -> Place:
        """Return the place of this rank's part of ``weight``, the value of parameter ``name``."""
        return cls(name, values_before(weight), local_part(weight).numel())

    def numbers(self, seed: int, step: int) -> Range:
        """Return the random numbers of the part in ``step`` of the run of ``seed``, one for each value."""
        return Range(key_of("rounding", seed, step, self.name), self.begin, self.count)


def in_float32(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return a float32 copy of ``tensors``: the values of all as one vector, and as views like each."""
    sizes = [tensor.numel() for tensor in tensors]
    flat = torch.empty(sum(sizes), device=tensors[0].device)
    copies = [
        own.view(each.shape) for own, each in zip(torch.split(flat, sizes), tensors, strict=True)
    ]
    torch._foreach_copy_(copies, list(tensors))
    return flat, copies


def write_rounded(
    weights: Sequence[Tensor], values: Tensor, places: Sequence[Place], seed: int, step: int
) -> None:
    """Round the float32 vector ``values`` of all ``weights``, which are at ``places``, into them."""
    numbers = random_numbers([place.numbers(seed, step) for place in places], values.device)
    parts = torch.split(rounded(values, numbers), [weight.numel() for weight in weights])
    new = [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)]
    torch._foreach_copy_(list(weights), new)


def rounded(values: Tensor, numbers: Tensor) -> Tensor:
    """Return float32 ``values`` in bfloat16, rounded away from zero where the low bits exceed ``numbers``.

    Those are random int16. What bfloat16 holds exactly, infinities and NaN stay as they are.
    """
    bits = numbers.int().bitwise_and_(_LOW_BITS).add_(values.view(torch.int32))
    return _high(bits).contiguous().masked_fill_(values.isnan(), torch.nan)


def take_averages(weights: Sequence[Tensor], averages: Sequence[Tensor]) -> None:
    """Give ``weights`` the rounded float32 ``averages``, which keep the weights in their place meanwhile."""
    for weight, average in zip(weights, averages, strict=True):
        average.view(torch.int32).add_(_HALF)
        _exchange(weight, average)


def give_back(weights: Sequence[Tensor], averages: Sequence[Tensor]) -> None:
    """Undo `take_averages`, to the bit."""
    for weight, average in zip(weights, averages, strict=True):
        _exchange(weight, average)
        average.view(torch.int32).sub_(_HALF)


def _exchange(weight: Tensor, average: Tensor) -> None:
    """Exchange ``weight`` and the high halves of the float32 numbers ``average``."""
    high, kept = _high(average), weight.clone()
    weight.copy_(high)
    high.copy_(kept)


def _high(values: Tensor) -> Tensor:
    """Return the high halves of float32 or int32 ``values``, not copied: the second ones, as in memory."""
    return values.view(torch.bfloat16)[..., 1::2]
