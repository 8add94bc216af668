"""Files that appear whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path beside ``path`` to write to; it takes the place of ``path`` unless writing fails."""
    partial = path.with_suffix(".partial")
    yield partial
    partial.replace(path)
