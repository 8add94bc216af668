"""Time spent training, and what follows from it: throughput and the time left."""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """Time spent training, with evaluation, sampling and saving left out."""

    def __init__(self, seconds: float = 0.0, now: Callable[[], float] = time.perf_counter) -> None:
        """Start from ``seconds`` already spent before a resume."""
        self._now, self._total, self._since = now, seconds, now()

    def pause(self) -> None:
        """Stop counting."""
        self._total += self._now() - self._since

    def go_on(self) -> None:
        """Count again."""
        self._since = self._now()

    @property
    def seconds(self) -> float:
        """Return the seconds counted so far; only meaningful while counting."""
        return self._total + self._now() - self._since
