"""Looks at the free memory in a thread, the more often the less there is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from fluxtrain.snapshots.free_memory import Bound, tightest

_FASTEST_GROWTH = 8e9
"""Bytes per second: memory that grows no faster is noticed before it touches the reserve."""
_SHORTEST, _LONGEST = 0.05, 1.0
"""Seconds between two looks."""
_NOTHING_LEFT = 0.25
"""Seconds to the next look if memory is short and there is nothing to free."""


class MemoryWatch:
    """Calls a function at each look that finds less memory than is to be left free."""

    def __init__(
        self, volume: Path, on_short: Callable[[Bound], bool], reserve_part: float = 1.0
    ) -> None:
        """Watch what bounds ``volume``; ``reserve_part`` of each reserve is to be left free.

        ``on_short`` returns whether it has freed something.
        """
        self._volume, self._on_short, self._part = volume, on_short, reserve_part
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)

    def __enter__(self) -> MemoryWatch:
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def look(self) -> float:
        """Call the function if memory is short; return the seconds until the next look."""
        with suppress(OSError):  # the volume is gone at the end of a run
            bound = tightest(self._volume)
            left = bound.free - self._part * bound.reserve
            if left < 0:
                return _SHORTEST if self._on_short(bound) else _NOTHING_LEFT
            return min(max(left / _FASTEST_GROWTH, _SHORTEST), _LONGEST)
        return _LONGEST

    def _run(self) -> None:
        seconds = 0.0
        while not self._ended.wait(seconds):
            seconds = self.look()
