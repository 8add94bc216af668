"""The open files of a data set, read at random: a large one has more files than may be open at once."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class OpenFiles:
    """Descriptors of ``paths`` by number, at most ``most`` of them: the one opened first goes first."""

    def __init__(self, paths: Sequence[Path], most: int | None = None) -> None:
        """Open nothing yet; ``most`` is half of what this process may open unless given."""
        self._paths, self._most = paths, most or _half_of_what_may_be_open()
        self._open: dict[int, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave open files behind when sent to another process."""
        return {**self.__dict__, "_open": {}}

    def __del__(self) -> None:
        """Close what is open."""
        for file in self._open.values():
            os.close(file)

    def get(self, number: int) -> int:
        """Return the descriptor of file ``number``; OSError where it is gone."""
        if number not in self._open:
            if len(self._open) >= self._most:
                os.close(self._open.pop(next(iter(self._open))))
            # Without O_NONBLOCK a named pipe in the place of a shard would hold the run up for ever.
            self._open[number] = os.open(self._paths[number], os.O_RDONLY | os.O_NONBLOCK)
        return self._open[number]


def _half_of_what_may_be_open() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, (soft if soft >= 0 else 1 << 20) // 2)


def fill(file: int, views: list[memoryview], offset: int) -> bool:
    """Fill ``views`` one after the other from ``offset`` of ``file``; False where the file ends before."""
    wanted, done = sum(map(len, views)), os.preadv(file, views, offset)
    while 0 < done < wanted:  # a network file system may return less than there is
        more = os.preadv(file, _after(views, done), offset + done)
        if more == 0:
            return False
        done += more
    return done == wanted


def _after(views: list[memoryview], done: int) -> list[memoryview]:
    """Return what is left of ``views`` when their first ``done`` bytes are filled."""
    rest = list[memoryview]()
    for view in views:
        if done < len(view):
            rest.append(view[done:])
        done = max(0, done - len(view))
    return rest
