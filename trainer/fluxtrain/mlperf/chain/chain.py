"""Appends to the chain of a run: a record is written before its line is in the log.

So every line of a log has its record at any moment at which the process may be killed. A thread of its own
waits for the disk; the head that is published is on it.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fluxtrain.errors import StorageError
from fluxtrain.files import atomic_write_by_several, sync
from fluxtrain.mlperf.chain.record import (
    END,
    LINE,
    NONE_BEFORE,
    RESUME,
    START,
    digest,
    encode,
    parsed,
    split,
)
from fluxtrain.mlperf.chain.replay import difference, lines_of
from fluxtrain.mlperf.lines import MAX_BYTES

OnHead = Callable[[int, str], None]
"""Is called with the number of records that are on the disk, and the hash of the last one."""


class Chain:
    """The chain of a run, as rank 0 of one start appends to it; thread-safe."""

    def __init__(self, path: Path, run: str, count: int, head: str, on_head: OnHead) -> None:
        """Append to ``path``, which has ``count`` records of the run with the id ``run``."""
        self.run = run
        self._path, self._on_head = path, on_head
        self._count, self._head = count, head
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._failure: OSError | None = None
        self._file: int | None = os.open(path, os.O_WRONLY | os.O_APPEND)
        self._inode = os.fstat(self._file).st_ino
        self._thread = threading.Thread(target=self._sync_all, name="chain", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls,
        path: Path,
        kept: Sequence[str],
        facts: Mapping[str, object],
        samples: int = 0,
        on_head: OnHead = lambda count, head: None,
    ) -> Chain:
        """Start the chain of a run whose log keeps the lines ``kept``, or continue the one at ``path``.

        The file is replaced, as ranks that were left behind write to the one before. A record that was torn
        is removed, and the new one says how long it was. ``facts`` are values of the record of this start,
        which resumes after ``samples``. Raises StorageError if the file cannot be read or written.
        """
        try:
            lines, torn = split(_read(path))
            records = parsed(lines)
            dropped, adopted = difference(lines_of(records), kept)
            first = records[0] if records else None
            run = str(first.values.get("run", "")) if first else secrets.token_hex(16)
            values = {
                "time_ms": int(time.time() * 1000),
                "run": run,
                "samples": samples,
                "dropped": dropped,
                "adopted": adopted,
                "torn_bytes": len(torn),
                **facts,
            }
            previous = digest(lines[-1]) if lines else NONE_BEFORE
            lines.append(encode(len(lines), previous, RESUME if lines else START, values))
            with atomic_write_by_several(path) as partial:
                partial.write_bytes(b"".join(line + b"\n" for line in lines))
                sync(partial)
            sync(path.parent)
            chain = cls(path, run, len(lines), digest(lines[-1]), on_head)
        except OSError as error:
            raise _unwritable(path, error) from None
        chain._wake.set()
        return chain

    def line(self, text: str, durable: bool = False) -> None:
        """Append the record of a line of the log; ``durable`` also waits until it is on the disk."""
        self.append(LINE, durable, text=text)

    def append(self, kind: str, durable: bool = False, **values: object) -> None:
        """Append a record of ``kind``; nothing after `close`. Raises StorageError if that fails."""
        with self._lock:
            if self._file is None:
                return
            time_ms = int(time.time() * 1000)
            line = encode(self._count, self._head, kind, {"time_ms": time_ms, **values})
            try:
                if self._failure is not None:
                    raise self._failure
                _write_whole(self._file, line + b"\n")
                self._count, self._head = self._count + 1, digest(line)
                if durable:
                    os.fsync(self._file)
            except OSError as error:
                raise _unwritable(self._path, error) from None
        self._wake.set()

    def close(self, finished: bool = False) -> None:
        """Close the file when all is on the disk; ``finished`` says that the log has its end."""
        try:
            if finished:
                self.append(END)
        finally:
            with self._lock:
                file, self._file = self._file, None
            self._wake.set()
            self._thread.join()
            if file is not None:
                self._sync(file)
                os.close(file)

    def _sync_all(self) -> None:
        """Wait for the disk after each change, until the chain is closed."""
        while True:
            self._wake.wait()
            self._wake.clear()
            if (file := self._file) is None:
                return
            self._sync(file)

    def _sync(self, file: int) -> None:
        """Publish the head that is on the disk, unless a newer start has replaced the file."""
        with self._lock:
            count, head = self._count, self._head
        try:
            os.fsync(file)
        except OSError as error:
            self._failure = error
            return
        with suppress(OSError):
            if self._path.stat().st_ino == self._inode:
                self._on_head(count, head)


def _read(path: Path) -> bytes:
    """Return the bytes of the file, none without one; raise StorageError if it is too large to be a chain."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return b""
    if len(content) > MAX_BYTES:
        raise StorageError(f"{path}: more than {MAX_BYTES} bytes, which is no chain of a log")
    return content


def _write_whole(file: int, content: bytes) -> None:
    while content:
        content = content[os.write(file, content) :]


def _unwritable(path: Path, error: OSError) -> StorageError:
    return StorageError(f"{path}: cannot be read or written ({error.strerror})")
