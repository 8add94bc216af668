"""The clock of training time, paused during evaluation, sampling and saving.

A GPU works behind the host, which only queues its work. So where time is taken, the host first waits until
the device has finished: otherwise the last steps would be counted as the evaluation that follows them.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """Measures the seconds spent training."""

    def __init__(
        self,
        finish_device: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Count from now on; ``finish_device`` waits until the device has done what is queued."""
        self._finish_device, self._now = finish_device, now
        self._total, self._since = 0.0, now()

    def start(self, seconds: float) -> None:
        """Count from now on, beside ``seconds`` spent before a resume."""
        self._total, self._since = seconds, self._now()

    def pause(self) -> None:
        """Stop counting when the device has finished."""
        self._finish_device()
        self._total += self._now() - self._since

    def resume(self) -> None:
        """Count again."""
        self._since = self._now()

    def finished_seconds(self) -> float:
        """Return the seconds counted until the device has finished; only valid while the clock runs."""
        self._finish_device()
        return self.seconds

    @property
    def seconds(self) -> float:
        """Return the seconds counted so far; only valid while the clock runs."""
        return self._total + self._now() - self._since
