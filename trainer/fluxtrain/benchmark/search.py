"""The search for the largest micro batch that fits: by doubling, then by bisection."""

from __future__ import annotations

from collections.abc import Callable


def largest_that_fits(fits: Callable[[int], bool], first: int, most: int) -> int:
    """Return the largest batch from 1 to ``most`` that ``fits``; 0 if there is none.

    The first try is ``first``. A batch is expected to fit if a larger one does.
    """
    batch = min(first, most)
    if fits(batch):
        below, above = _double(fits, batch, most)
    else:
        below, above = _halve(fits, batch)
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if fits(middle) else (below, middle)
    return below


def _double(fits: Callable[[int], bool], batch: int, most: int) -> tuple[int, int]:
    """Return a batch that fits, and a larger one that does not, or is above ``most``."""
    while batch < most:
        larger = min(2 * batch, most)
        if not fits(larger):
            return batch, larger
        batch = larger
    return most, most + 1


def _halve(fits: Callable[[int], bool], batch: int) -> tuple[int, int]:
    """Return a batch that fits, 0 if none does, and a larger one that does not."""
    while batch > 1:
        smaller = batch // 2
        if fits(smaller):
            return smaller, batch
        batch = smaller
    return 0, 1


def batches_up_to(largest: int) -> list[int]:
    """Return the powers of two below ``largest``, and ``largest``; nothing if it is 0."""
    powers = [1 << exponent for exponent in range(largest.bit_length()) if 1 << exponent < largest]
    return [*powers, largest] if largest else []
