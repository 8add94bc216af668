"""A bounded cache of open file descriptors: a large data set has more files than a process may open."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class _Descriptors:
    """Open descriptors of ``paths`` by number."""

    def __init__(self, paths: Sequence[Path], max_open: int) -> None:
        """Open nothing yet."""
        self._paths, self._max_open, self._open = paths, max_open, dict[int, int]()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without open descriptors, for another process."""
        return {**self.__dict__, "_open": {}}

    def __del__(self) -> None:
        """Close all descriptors."""
        for file in self._open.values():
            os.close(file)

    def _open_file(self, number: int) -> int:
        # O_NONBLOCK: opening a named pipe would otherwise block forever.
        return os.open(self._paths[number], os.O_RDONLY | os.O_NONBLOCK)


class OpenFiles(_Descriptors):
    """Descriptors by number, at most ``max_open``; the oldest is closed first."""

    def __init__(self, paths: Sequence[Path], max_open: int | None = None) -> None:
        """Open nothing yet; ``max_open`` defaults to half of the process's limit."""
        super().__init__(paths, max_open or max(1, max_open_files() // 2))

    def get(self, number: int) -> int:
        """Return the descriptor of file ``number``; OSError if it cannot be opened."""
        if number not in self._open:
            if len(self._open) >= self._max_open:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[number] = self._open_file(number)
        return self._open[number]


class SharedFiles(_Descriptors):
    """Descriptors for several threads, at most ``max_open``; other files are opened for each read.

    None is closed before the data set is, so that no thread loses the one it is reading.
    """

    def read(self, number: int, offset: int, size: int) -> bytes:
        """Return up to ``size`` bytes from ``offset`` of file ``number``; OSError if it cannot be opened."""
        file = self._open.get(number)
        if file is not None:
            return read_bytes(file, offset, size)
        file = self._open_file(number)
        # setdefault is atomic; a lock could be held by another thread during a fork.
        if len(self._open) < self._max_open and self._open.setdefault(number, file) == file:
            return read_bytes(file, offset, size)
        try:
            return read_bytes(file, offset, size)
        finally:
            os.close(file)


def max_open_files() -> int:
    """Return the soft limit on this process's open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft >= 0 else 1 << 20


def read_bytes(file: int, offset: int, size: int) -> bytes:
    """Return ``size`` bytes from ``offset`` of ``file``, or fewer if it ends before."""
    content = os.pread(file, size, offset)
    while len(content) < size:  # a network file system may return less than requested
        more = os.pread(file, size - len(content), offset + len(content))
        if not more:
            break
        content += more
    return content


def read_into(file: int, views: list[memoryview], offset: int) -> bool:
    """Fill ``views`` one after the other from ``offset`` of ``file``; False if the file ends before."""
    size, done = sum(map(len, views)), os.preadv(file, views, offset)
    while 0 < done < size:  # a network file system may return less than requested
        count = os.preadv(file, _remaining(views, done), offset + done)
        if count == 0:
            return False
        done += count
    return done == size


def _remaining(views: list[memoryview], done: int) -> list[memoryview]:
    """Return what is left of ``views`` after their first ``done`` bytes."""
    remaining = list[memoryview]()
    for view in views:
        if done < len(view):
            remaining.append(view[done:])
        done = max(0, done - len(view))
    return remaining
