"""Aligned tables, and medians with minimum and maximum."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print ``rows`` below ``head``: the first column left-aligned, the others right-aligned."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    print(f"\n{title}")
    for line in lines:
        first, *others = (
            f"{cell:<{w}}" if i == 0 else f"{cell:>{w}}"
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        print("  " + "  ".join([first, *others]).rstrip())
    print(flush=True)


def spread(values: Sequence[float], scale: float = 1.0, digits: int = 0) -> str:
    """Return the median with minimum and maximum: ``12 (11-14)``."""
    least, middle, most = (scale * f(values) for f in (min, median, max))
    return f"{middle:.{digits}f} ({least:.{digits}f}-{most:.{digits}f})"
