"""Shows how much of remote data is fetched: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import threading
import time

from tqdm import tqdm

_LINE_SECONDS, _BAR_SECONDS = 10.0, 0.5
_MIB = 1 << 20


class FetchConsole:
    """Writes to stderr; its counter may be advanced by several threads."""

    def __init__(self, is_shown: bool, url: str, files: int, size: int) -> None:
        """Print what there is to fetch, in files and bytes."""
        self._stream, self._is_shown, self._size = sys.stderr, is_shown, size
        self._lock, self._done, self._begin = threading.Lock(), 0, time.monotonic()
        is_terminal = is_shown and self._stream.isatty()
        self._every = _BAR_SECONDS if is_terminal else _LINE_SECONDS
        self._next = self._begin + self._every
        self._bar: tqdm | None = None
        if is_shown:
            text = f"fetch {files} files, {size / _MIB:,.1f} MiB, from {url}"
            print(text, file=self._stream, flush=True)
        if is_terminal:
            self._bar = tqdm(total=size, desc="fetch", unit="B", unit_scale=True, file=self._stream)

    def __enter__(self) -> FetchConsole:
        """Return the console."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()

    def advance(self, count: int) -> None:
        """Add ``count`` bytes; it is negative if some must be fetched again."""
        with self._lock:
            self._done += count

    def show(self) -> None:
        """Show the progress if it is time."""
        now = time.monotonic()
        if not self._is_shown or now < self._next:
            return
        self._next = now + self._every
        if self._bar is not None:
            self._bar.update(self._done - self._bar.n)
            return
        rate = self._done / (now - self._begin)
        left = f"{(self._size - self._done) / rate:.0f} s left" if rate else "time left unknown"
        done, size = self._done / _MIB, self._size / _MIB
        text = f"fetch {done:,.1f}/{size:,.1f} MiB  {rate / _MIB:.1f} MiB/s  {left}"
        print(text, file=self._stream, flush=True)
