"""A queue of keys: each at most once, none worked on twice at a time, failures later and later."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

Key = tuple[str, str]
"""Namespace and name of a job."""
Work = Callable[[Key], Awaitable[float | None]]
"""Does what is due for a key; returns the seconds after which to look again, or None."""

_FIRST_RETRY_SECONDS = 1.0
_LAST_RETRY_SECONDS = 60.0


class WorkQueue:
    """Keys that wait for work. Events only add keys; what to do is found out when a key's turn comes."""

    def __init__(self, failed: Callable[[Key, Exception], None]) -> None:
        """Tell ``failed`` of every exception; the key comes back with a growing delay."""
        self._failed = failed
        self._ready: asyncio.Queue[Key] = asyncio.Queue()
        self._waiting: set[Key] = set()
        self._busy: set[Key] = set()
        self._again: set[Key] = set()
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}

    def __len__(self) -> int:
        """Return the number of keys whose turn has come."""
        return len(self._waiting)

    def add(self, key: Key) -> None:
        """Let ``key`` have its turn as soon as may be; at once again if it is being worked on."""
        if key in self._busy:
            self._again.add(key)
        elif key not in self._waiting:
            self._waiting.add(key)
            self._ready.put_nowait(key)

    def add_after(self, key: Key, seconds: float) -> None:
        """Let ``key`` have its turn in ``seconds``, or when it was already due if that is sooner."""
        loop = asyncio.get_running_loop()
        due, known = loop.time() + seconds, self._timers.get(key)
        if known is not None and not known.cancelled() and known.when() <= due:
            return
        if known is not None:
            known.cancel()
        self._timers[key] = loop.call_at(due, self._due, key)

    def forget(self, key: Key) -> None:
        """Drop what is remembered of a key that is no more."""
        self._failures.pop(key, None)
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()

    async def run(self, work: Work, num_workers: int) -> None:
        """Work on keys until cancelled, ``num_workers`` at a time."""
        async with asyncio.TaskGroup() as group:
            for _ in range(num_workers):
                group.create_task(self._worker(work))

    async def _worker(self, work: Work) -> None:
        while True:
            key = await self._ready.get()
            self._waiting.discard(key)
            self._busy.add(key)
            try:
                again = await work(key)
                self._failures.pop(key, None)
            except Exception as error:
                again = self._delay(key)
                self._failed(key, error)
            finally:
                self._busy.discard(key)
            if key in self._again:
                self._again.discard(key)
                self.add(key)
            if again is not None:
                self.add_after(key, again)

    def _delay(self, key: Key) -> float:
        times = self._failures.get(key, 0)
        self._failures[key] = times + 1
        return float(min(_LAST_RETRY_SECONDS, _FIRST_RETRY_SECONDS * 2**times))

    def _due(self, key: Key) -> None:
        self._timers.pop(key, None)
        self.add(key)
