"""Files that appear whole or not at all, and how much of them is there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield the path beside ``path`` to write to; it takes the place of ``path`` unless writing fails."""
    partial = path.with_suffix(".partial")
    yield partial
    partial.replace(path)


def folder_size(folder: Path) -> int:
    """Return the bytes of the files in ``folder``, which may come and go; 0 where it is not there."""
    total = 0
    with suppress(OSError):
        for path in folder.iterdir():
            with suppress(OSError):
                total += path.stat().st_size
    return total
