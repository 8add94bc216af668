"""The clock of training time, paused during evaluation, sampling and saving."""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """Measures the seconds spent training."""

    def __init__(self, seconds: float = 0.0, now: Callable[[], float] = time.perf_counter) -> None:
        """Start from ``seconds`` spent before a resume."""
        self._now, self._total, self._since = now, seconds, now()

    def pause(self) -> None:
        """Stop counting."""
        self._total += self._now() - self._since

    def resume(self) -> None:
        """Count again."""
        self._since = self._now()

    @property
    def seconds(self) -> float:
        """Return the seconds counted so far; only valid while the clock runs."""
        return self._total + self._now() - self._since
