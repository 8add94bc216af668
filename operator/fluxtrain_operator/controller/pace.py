"""A limited rate for work that begins for all jobs at once, such as the first polls of a new leader."""

from __future__ import annotations

import asyncio


class Pace:
    """Lets callers go on one after the other, the first of them at once."""

    def __init__(self, per_second: float) -> None:
        """Let ``per_second`` callers go on."""
        self._interval, self._next = 1.0 / per_second, float("-inf")

    async def wait(self) -> None:
        """Wait for the caller's turn."""
        now = asyncio.get_running_loop().time()
        at = max(now, self._next)
        self._next = at + self._interval
        await asyncio.sleep(at - now)
