"""A work queue of job keys, in the manner of client-go: deduplicated, with delayed requeue and backoff.

Namespaces are served in turn, and a part of the workers is left to the others: one tenant's jobs never delay
another's for long.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable

from fluxtrain_operator.base.names import Key

Work = Callable[[Key], Awaitable[float | None]]
"""Processes a key; returns the seconds after which to requeue it, or None."""

_LEFT_TO_OTHERS = 5
"""One in so many workers serves the jobs of other namespaces than the busiest."""
_FIRST_BACKOFF_SECONDS = 1.0
_MAX_BACKOFF_SECONDS = 60.0


class WorkQueue:
    """Keys to process, each queued at most once and never processed by two workers at a time."""

    def __init__(
        self, on_error: Callable[[Key, Exception], None], min_interval_seconds: float = 0.0
    ) -> None:
        """Call ``on_error`` with every exception; the key is requeued with exponential backoff.

        A processed key is not processed again within ``min_interval_seconds``, so that the events of that
        time are handled together.
        """
        self._on_error, self._min_interval_seconds = on_error, min_interval_seconds
        self._queue = FairQueue()
        self._queued: set[Key] = set()
        self._processing: set[Key] = set()
        self._dirty: set[Key] = set()  # added while being processed
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._queued)

    def add(self, key: Key) -> None:
        """Queue ``key``; one that is being processed is queued as soon as that is done."""
        if key in self._processing:
            self._dirty.add(key)
        elif key not in self._queued:
            self._queued.add(key)
            self._queue.put(key)

    async def run(self, work: Work, num_workers: int) -> None:
        """Process keys with ``num_workers`` workers until cancelled."""
        self._queue.max_per_namespace = num_workers - num_workers // _LEFT_TO_OTHERS
        async with asyncio.TaskGroup() as group:
            for _ in range(num_workers):
                group.create_task(self._worker(work))

    async def _worker(self, work: Work) -> None:
        loop = asyncio.get_running_loop()
        while True:
            key = await self._queue.get()
            self._queued.discard(key)
            self._processing.add(key)
            try:
                delay = await work(key)
                self._failures.pop(key, None)
            except Exception as error:
                failures = self._failures.get(key, 0)
                self._failures[key] = failures + 1
                delay = float(min(_MAX_BACKOFF_SECONDS, _FIRST_BACKOFF_SECONDS * 2**failures))
                self._on_error(key, error)
            finally:
                self._queue.release(key)
                loop.call_later(self._min_interval_seconds, self._done, key)
            self._add_after(key, delay)
            await asyncio.sleep(0)  # otherwise all keys that need no request are processed at once

    def _done(self, key: Key) -> None:
        self._processing.discard(key)
        if key in self._dirty:
            self._dirty.discard(key)
            self.add(key)

    def _add_after(self, key: Key, seconds: float | None) -> None:
        """Queue ``key`` after ``seconds``, instead of at the time set before; None only cancels that."""
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()
        if seconds is not None:
            loop = asyncio.get_running_loop()
            self._timers[key] = loop.call_later(seconds, self._on_timer, key)

    def _on_timer(self, key: Key) -> None:
        self._timers.pop(key, None)
        self.add(key)


class FairQueue:
    """Keys in order of arrival within a namespace; of several namespaces, one key of each in turn."""

    def __init__(self) -> None:
        self.max_per_namespace = 1_000_000
        """Keys of one namespace that may be processed at a time; the others' workers stay free."""
        self._waiting: OrderedDict[str, deque[Key]] = OrderedDict()
        self._processed: Counter[str] = Counter()
        self._changed = asyncio.Event()

    def put(self, key: Key) -> None:
        self._waiting.setdefault(key[0], deque()).append(key)
        self._changed.set()

    async def get(self) -> Key:
        """Return the next key, once there is one; call `release` when it is processed."""
        while (key := self._next()) is None:
            self._changed.clear()
            await self._changed.wait()
        return key

    def release(self, key: Key) -> None:
        """Let another key of the namespace be processed."""
        self._processed[key[0]] -= 1
        if not self._processed[key[0]]:
            del self._processed[key[0]]
        self._changed.set()

    def _next(self) -> Key | None:
        """Return the first key of the first namespace that may have one more; it becomes the last in turn."""
        for namespace, keys in self._waiting.items():
            if self._processed[namespace] < self.max_per_namespace:
                key = keys.popleft()
                self._processed[namespace] += 1
                self._waiting.move_to_end(namespace)
                if not keys:
                    del self._waiting[namespace]
                return key
        return None


# A limited rate for work that begins for all jobs at once, such as the first polls of a new leader.


class Pace:
    """Lets callers go on one after the other, the first of them at once."""

    def __init__(self, per_second: float) -> None:
        self._interval, self._next = 1.0 / per_second, float("-inf")

    async def wait(self) -> None:
        """Wait for the caller's turn."""
        now = asyncio.get_running_loop().time()
        at = max(now, self._next)
        self._next = at + self._interval
        await asyncio.sleep(at - now)
