"""A bounded folder of the node for fetched data, which the ranks of several jobs share.

    folder/
      lock                 held while room is made
      locks/KEY            held by the process that fills an entry, shared by those that read it
      entries/KEY/size     bytes that the entry may take
      entries/KEY/DONE     written last; modified when the entry was last used
      entries/KEY/data/    the files

The kernel releases the locks of a process that ends in any way. An entry that is not done is continued by
the next process. The least recently used entries that nobody reads are removed when there is no room.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fluxtrain.errors import DataError, StorageError
from fluxtrain.runtime.files import atomic_write, exclusive_lock, storage_errors, write_to_disk

_POLL_SECONDS = 0.2
_LOCK_SECONDS = 60.0
GIB = 1 << 30


@dataclass(frozen=True)
class NodeCache:
    """The folder, and the most bytes that all entries may take."""

    folder: Path
    max_bytes: int

    def data_folder(self, key: str) -> Path:
        """Return the folder of the files of the entry ``key``, whether there is one or not."""
        return self.folder / "entries" / key / "data"

    @contextmanager
    def entry(
        self,
        key: str,
        size: int,
        fill: Callable[[Path], object],
        check: Callable[[], object],
        no_room: Callable[[str], object] | None = None,
    ) -> Iterator[Path]:
        """Yield the folder of the entry ``key``, which no process removes meanwhile.

        If it is not done, ``fill`` writes its files, ``size`` bytes at most, or continues what another began;
        of several processes one does. ``check`` is called while another is waited for. With ``no_room``, room
        that others use is waited for too, and ``no_room`` is called with what lacks.
        Raises DataError if there is no room, StorageError if the disk is full.
        """
        with storage_errors(self.folder):
            for name in ("locks", "entries"):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
            lock = os.open(self.folder / "locks" / key, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            data = self._filled(key, size, fill, check, lock, no_room)
            yield data
        finally:
            os.close(lock)

    def _filled(
        self,
        key: str,
        size: int,
        fill: Callable[[Path], object],
        check: Callable[[], object],
        lock: int,
        no_room: Callable[[str], object] | None,
    ) -> Path:
        """Return the folder of the entry when it is done; ``lock`` is then shared."""
        data = self.data_folder(key)
        done = data.with_name("DONE")
        while True:
            if done.exists():
                if _locked(lock, fcntl.LOCK_SH) and done.exists():
                    os.utime(done)
                    return data
            elif _locked(lock, fcntl.LOCK_EX) and not done.exists():
                with storage_errors(self.folder):
                    lacking = self._make_room(key, size)
                    if not lacking:
                        data.mkdir(parents=True, exist_ok=True)
                        fill(data)
                        write_to_disk(done, "")
                        continue  # no lock becomes shared at once: somebody may remove the entry
                if no_room is None or size > self.max_bytes:
                    raise DataError(lacking)
                no_room(lacking)
            fcntl.flock(lock, fcntl.LOCK_UN)
            check()
            time.sleep(_POLL_SECONDS)

    def remove(self, key: str) -> None:
        """Remove the entry ``key``, unless a process fills or reads it."""
        with storage_errors(self.folder):
            self._remove(self.folder / "entries" / key)

    def _make_room(self, key: str, size: int) -> str:
        """Remove entries until ``size`` bytes more fit; then they are this entry's.

        Return "", or that they do not fit.
        """
        (self.folder / "lock").touch()
        with exclusive_lock(self.folder / "lock", wait_seconds=_LOCK_SECONDS):
            others = {path: _size(path) for path in self._others(key)}
            for path in list(others):
                if sum(others.values()) + size <= self.max_bytes:
                    break
                if self._remove(path):
                    del others[path]
            used, own = sum(others.values()), self.folder / "entries" / key
            if used + size > self.max_bytes:
                return (
                    f"spec.run.data.download.max_bytes: {gib(self.max_bytes)} do not hold "
                    f"{gib(size)} of data" + f" beside {gib(used)} in use" * bool(used)
                )
            missing = size - _disk_use(own) - shutil.disk_usage(self.folder).free
            if missing > 0:
                raise StorageError(
                    f"{self.folder}: the disk has {gib(missing)} too little for the data; "
                    "spec.run.data.download.folder names another"
                )
            own.mkdir(exist_ok=True)
            with atomic_write(own / "size") as partial:
                partial.write_text(str(size), encoding="utf-8")
        return ""

    def _others(self, key: str) -> list[Path]:
        """Return all other entries, the least recently used first."""
        paths = [path for path in (self.folder / "entries").iterdir() if path.name != key]
        return sorted(paths, key=lambda path: (_used(path), path.name))

    def _remove(self, path: Path) -> bool:
        """Remove the entry ``path`` unless a process fills or reads it; return whether it is gone."""
        lock = os.open(self.folder / "locks" / path.name, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not _locked(lock, fcntl.LOCK_EX):
                return False
            (path / "DONE").unlink(missing_ok=True)  # first: what is left is not taken for whole
            shutil.rmtree(path, ignore_errors=True)
            return not path.exists()
        finally:
            os.close(lock)


def _locked(lock: int, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _size(entry: Path) -> int:
    try:
        return int((entry / "size").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return _disk_use(entry)


def _disk_use(folder: Path) -> int:
    total = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            with suppress(OSError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _used(entry: Path) -> float:
    for path in (entry / "DONE", entry):
        with suppress(OSError):
            return path.stat().st_mtime
    return 0.0


def gib(size: int) -> str:
    """Return ``size`` in bytes as GiB."""
    return f"{size / GIB:.2f} GiB"
