"""Shards on a mounted volume as a store, so that they are listed and pinned as those at URLs are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fluxtrain.remote.http import ByteStream
from fluxtrain.remote.store import ChangedError, RefusedError, RemoteFile


@dataclass(frozen=True)
class LocalStore:
    """The files below the folder ``root``."""

    root: Path

    def files(self) -> list[RemoteFile]:
        """Return all files in the order of their names; RefusedError if there is no such folder."""
        if not self.root.is_dir():
            raise RefusedError(f"{self.root} is missing")
        paths = sorted(path for path in self.root.rglob("*") if path.is_file())
        return [self._file(path) for path in paths]

    @contextmanager
    def open(self, file: RemoteFile, offset: int) -> Iterator[ByteStream]:
        """Yield the bytes of ``file`` from ``offset`` on; ChangedError if it is not as it was listed."""
        path = self.root / file.name
        with path.open("rb") as opened:
            if self._file(path) != file:
                raise ChangedError("it has changed since it was listed")
            yield ByteStream(opened, opened.seek(offset), file.size)

    def _file(self, path: Path) -> RemoteFile:
        status = path.stat()
        name = path.relative_to(self.root).as_posix()
        return RemoteFile(name, status.st_size, str(status.st_mtime_ns))
