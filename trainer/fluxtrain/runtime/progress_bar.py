"""Progress of a long task: a bar on a terminal, else a line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from threading import Lock
from typing import TextIO

from tqdm import tqdm

Advance = Callable[[int], None]
"""Takes the units done since the last call; negative if some must be done again."""
OnProgress = Callable[[int, int], None]
"""Takes the units done so far and the total."""
_BAR_SECONDS, _LINE_SECONDS = 0.5, 10.0
_MIB = 1 << 20


class ProgressBar:
    """Shows how many of ``total`` units are done; several threads may advance it."""

    def __init__(
        self,
        name: str,
        total: int = 0,
        stream: TextIO | None = None,
        *,
        unit: str = "",
        is_shown: bool = True,
        on_progress: OnProgress = lambda done, total: None,
    ) -> None:
        """Write to ``stream``, by default stderr; a ``unit`` of B is bytes, a ``total`` of 0 is not known."""
        self.done, self.total = 0, total
        self._name, self._unit, self._on_progress = name, unit, on_progress
        self._stream, self._is_shown, self._lock = stream or sys.stderr, is_shown, Lock()
        is_terminal = is_shown and self._stream.isatty()
        self._bar = tqdm(
            total=total or None,
            desc=name,
            unit=unit or "it",
            unit_scale=unit == "B",
            file=self._stream,
            leave=False,
            disable=not is_terminal,
        )
        self._every = _BAR_SECONDS if is_terminal else _LINE_SECONDS
        self._begin = time.monotonic()
        self._next = self._begin + self._every

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    @property
    def is_due(self) -> bool:
        """Return whether it is time to show the progress again."""
        return self._is_shown and time.monotonic() >= self._next

    def advance(self, count: int) -> None:
        """Add ``count`` units, and show the progress if it is time."""
        with self._lock:
            self.done += count
            self._on_progress(self.done, self.total)
            self._show()

    def show(self) -> None:
        """Show the progress if it is time, as while nothing is done."""
        with self._lock:
            self._show()

    def _show(self) -> None:
        if not self.is_due:
            return
        now = time.monotonic()
        self._next = now + self._every
        if not self._bar.disable:
            self._bar.update(self.done - self._bar.n)
            return
        rate, left = self.done / (now - self._begin), max(0, self.total - self.done)
        counts = f"{self._amount(self.done)}/{self._amount(self.total)}"
        text = f"{left / rate:.0f} s left" if rate else "time left unknown"
        if not self.total:
            counts, text = self._amount(self.done), ""
        line = f"{self._name} {counts}  {self._amount(round(rate, 1))}/s  {text}"
        print(line.rstrip(), file=self._stream, flush=True)

    def _amount(self, number: float) -> str:
        return f"{number / _MIB:,.1f} MiB" if self._unit == "B" else f"{number:,}"
