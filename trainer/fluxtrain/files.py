"""Atomic writes, and the size of a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; it replaces ``path`` unless the body raises."""
    partial = path.with_suffix(".partial")
    yield partial
    partial.replace(path)


def folder_size(folder: Path) -> int:
    """Return the total size in bytes of the files in ``folder``; files that vanish meanwhile count as 0."""
    total = 0
    with suppress(OSError):
        for path in folder.iterdir():
            with suppress(OSError):
                total += path.stat().st_size
    return total
