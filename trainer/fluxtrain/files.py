"""Atomic writes, writes to disk, locks, and the size of a folder."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fluxtrain.errors import StorageError

_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP)
"""Errors of file systems that cannot write the names in a folder to the disk."""


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; it replaces ``path`` unless the body raises.

    The file is new: a link that somebody left at its name is removed, not followed.
    """
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with suppress(FileNotFoundError):  # the writer will report that there is no such folder
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    yield partial
    partial.replace(path)


@contextmanager
def atomic_write_by_several(path: Path) -> Iterator[Path]:
    """As `atomic_write`, for a ``path`` that others may replace too: the temporary path is of this call."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_to_disk(path: Path, text: str) -> None:
    """Write ``text`` to ``path``; return when it is on the disk."""
    path.write_text(text)
    sync(path)


def sync(path: Path) -> None:
    """Return when the contents of the file ``path``, or the names in the folder ``path``, are on the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(file)


@contextmanager
def exclusive_lock(path: Path, refusal: str = "", wait_seconds: float = 0.0) -> Iterator[None]:
    """Hold a lock on ``path``, a file or a folder; the kernel releases it if the process ends.

    Raises StorageError, with the text ``refusal``, if another process still holds it after ``wait_seconds``.
    """
    file = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)  # NFS locks what it may write
    deadline = time.monotonic() + wait_seconds
    try:
        # a file system without locks, such as some NFS: the user must run one process only
        with suppress(OSError):
            while not _try_lock(file):
                if time.monotonic() >= deadline:
                    raise StorageError(refusal or f"{path}: another process is writing here")
                time.sleep(0.2)
        yield
    finally:
        os.close(file)


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def folder_size(folder: Path) -> int:
    """Return the total size in bytes of the files in ``folder``; files that vanish meanwhile count as 0."""
    total = 0
    with suppress(OSError):
        for path in folder.iterdir():
            with suppress(OSError):
                total += path.stat().st_size
    return total
