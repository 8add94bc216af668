"""A queue of keys: each at most once, none worked on twice at a time, failures later and later."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fluxtrain_operator.names import Key

Work = Callable[[Key], Awaitable[float | None]]
"""Does what is due for a key; returns the seconds after which to look again, or None."""

_FIRST_RETRY_SECONDS = 1.0
_LAST_RETRY_SECONDS = 60.0


class WorkQueue:
    """Keys that wait for work. Events only add keys; what to do is found out when a key's turn comes."""

    def __init__(
        self, failed: Callable[[Key, Exception], None], min_interval_seconds: float = 0.0
    ) -> None:
        """Tell ``failed`` of every exception; the key comes back with a growing delay.

        A key that had its turn has no other within ``min_interval_seconds``: what happens meanwhile is worked
        on together.
        """
        self._failed, self._min_interval_seconds = failed, min_interval_seconds
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

    def reorder(self, rank: Callable[[Key], int]) -> None:
        """Let the keys that wait have their turns in the order of ``rank``, those of equal rank as before."""
        waiting = sorted((self._ready.get_nowait() for _ in range(self._ready.qsize())), key=rank)
        for key in waiting:
            self._ready.put_nowait(key)

    async def run(self, work: Work, num_workers: int) -> None:
        """Work on keys until cancelled, ``num_workers`` at a time."""
        async with asyncio.TaskGroup() as group:
            for _ in range(num_workers):
                group.create_task(self._worker(work))

    async def _worker(self, work: Work) -> None:
        loop = asyncio.get_running_loop()
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
                loop.call_later(self._min_interval_seconds, self._rested, key)
            self._look_again(key, again)

    def _rested(self, key: Key) -> None:
        self._busy.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def _look_again(self, key: Key, seconds: float | None) -> None:
        """Let ``key`` have its turn in ``seconds``; None: not by itself. What was said before is void."""
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()
        if seconds is not None:
            loop = asyncio.get_running_loop()
            self._timers[key] = loop.call_later(seconds, self._due, key)

    def _delay(self, key: Key) -> float:
        times = self._failures.get(key, 0)
        self._failures[key] = times + 1
        return float(min(_LAST_RETRY_SECONDS, _FIRST_RETRY_SECONDS * 2**times))

    def _due(self, key: Key) -> None:
        self._timers.pop(key, None)
        self.add(key)
