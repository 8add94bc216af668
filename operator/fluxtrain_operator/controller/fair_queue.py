"""A queue of job keys that serves namespaces in turn: the jobs of one never wait for all of another's."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque

from fluxtrain_operator.names import Key


class FairQueue:
    """Keys in order of arrival within a namespace; of several namespaces, one key of each in turn."""

    def __init__(self) -> None:
        """Start empty, without a limit."""
        self.max_per_namespace = 1_000_000
        """Keys of one namespace that may be processed at a time; the others' workers stay free."""
        self._waiting: OrderedDict[str, deque[Key]] = OrderedDict()
        self._processed: Counter[str] = Counter()
        self._changed = asyncio.Event()

    def put(self, key: Key) -> None:
        """Add ``key``."""
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
