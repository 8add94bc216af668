"""Which blocks recompute their activations."""

from __future__ import annotations


def is_recomputed(index: int, fraction: float) -> bool:
    """Return whether block ``index`` is one of ``fraction`` of the blocks, spread evenly.

    It is where ``fraction`` times the number of blocks passes a whole number.
    """
    return int((index + 1) * fraction) > int(index * fraction)


def recomputed_blocks(num_blocks: int, fraction: float, start: int = 0) -> int:
    """Return how many of ``num_blocks`` blocks from index ``start`` on recompute their activations."""
    return sum(is_recomputed(index, fraction) for index in range(start, start + num_blocks))
