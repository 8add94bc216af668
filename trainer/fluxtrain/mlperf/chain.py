"""Appends to the chain of a run: a record is written before its line is in the log.

So every line of a log has its record at any moment at which the process may be killed. A thread of its
own waits for the disk; the head that is published is on it.

A record is one line of JSON with the SHA-256 of the line before it, without its newline:

    {"number": 7, "previous": "5c1f…", "kind": "line", "time_ms": 1700000000000, "text": ":::MLLOG {…}"}
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fluxtrain.errors import StorageError
from fluxtrain.mlperf.log_lines import MAX_BYTES
from fluxtrain.runtime.files import atomic_write_by_several, sync

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
                write_whole(self._file, line + b"\n")
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


def write_whole(file: int, content: bytes) -> None:
    """Write ``content`` with one call, so that other output cannot come between."""
    while content:
        content = content[os.write(file, content) :]


def _unwritable(path: Path, error: OSError) -> StorageError:
    return StorageError(f"{path}: cannot be read or written ({error.strerror})")


NONE_BEFORE = "0" * 64
"""What the first record names as the one before it."""
START, RESUME, LINE, DATA, WEIGHTS, CHECKPOINT, END = (
    *("start", "resume", "line", "data", "weights", "checkpoint", "end"),
)
"""Kinds: the first record; each later start of all ranks; a line of the log; the digests of the data sets; of
the initial weights; a complete checkpoint; the end of a process that closed a finished log."""
KINDS = (START, RESUME, LINE, DATA, WEIGHTS, CHECKPOINT, END)
_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Record:
    """A record; ``values`` are those of its kind."""

    number: int
    previous: str
    kind: str
    values: Mapping[str, Any]

    @property
    def text(self) -> str:
        """Return the line of the log, the empty string for other kinds."""
        text = self.values.get("text")
        return text if self.kind == LINE and isinstance(text, str) else ""

    @property
    def time(self) -> float | None:
        """Return the Unix time at which it was written, by the clock of rank 0's node; None without one."""
        milliseconds = self.values.get("time_ms")
        return milliseconds / 1000 if type(milliseconds) is int else None

    @property
    def dropped(self) -> frozenset[int]:
        """Return the numbers of the records whose lines a resume removed from the log."""
        return frozenset(number for number in _list(self.values, "dropped") if type(number) is int)

    @property
    def adopted(self) -> list[str]:
        """Return the lines that were in the log without a record when the run was resumed."""
        return [text for text in _list(self.values, "adopted") if isinstance(text, str)]


def encode(number: int, previous: str, kind: str, values: Mapping[str, object]) -> bytes:
    """Return the line of a record, without its newline."""
    record = {"number": number, "previous": previous, "kind": kind, **values}
    return json.dumps(record, separators=(",", ":")).encode("ascii")


def digest(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def is_digest(value: object) -> bool:
    """Return whether ``value`` is a SHA-256 in lower-case hexadecimal digits."""
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def parse(line: bytes) -> Record:
    """Return the record in ``line``; raise ValueError if it is none."""
    try:
        values = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    number, previous, kind = (values.pop(name, None) for name in ("number", "previous", "kind"))
    if type(number) is not int or not is_digest(previous) or kind not in KINDS:
        raise ValueError("no number, hash and kind of a record")
    return Record(number, previous, kind, values)


def parsed(lines: Iterable[bytes]) -> list[Record | None]:
    """Return the record of each line, None for a line that is none."""
    records: list[Record | None] = []
    for line in lines:
        try:
            records.append(parse(line))
        except ValueError:
            records.append(None)
    return records


def split(content: bytes) -> tuple[list[bytes], bytes]:
    """Return the whole lines of a chain, and the bytes of a last one whose newline is missing."""
    *lines, torn = content.split(b"\n")
    return lines, torn


def _list(values: Mapping[str, Any], name: str) -> list[Any]:
    value = values.get(name)
    return value if isinstance(value, list) else []


@dataclass(frozen=True)
class ChainedLine:
    """A line of the log, and the number of the record that has it."""

    number: int
    text: str


def follow(lines: list[ChainedLine], record: Record) -> None:
    """Make ``lines`` of the log what they are after ``record``."""
    texts = [record.text] if record.kind == LINE else []
    if record.kind in (START, RESUME):
        dropped, texts = record.dropped, record.adopted
        lines[:] = [line for line in lines if line.number not in dropped]
    lines += (ChainedLine(record.number, text) for text in texts)


def lines_of(records: Iterable[Record | None]) -> list[ChainedLine]:
    """Return the lines of the log after all ``records``; None, which is no record, changes nothing."""
    lines = list[ChainedLine]()
    for record in records:
        if record is not None:
            follow(lines, record)
    return lines


def difference(lines: Sequence[ChainedLine], kept: Sequence[str]) -> tuple[list[int], list[str]]:
    """Return the records of ``lines`` not in ``kept``, and the texts in ``kept`` without one."""
    dropped, adopted, position = list[int](), list[str](), 0
    texts = [line.text for line in lines]
    for text in kept:
        try:
            found = texts.index(text, position)
        except ValueError:
            adopted.append(text)
            continue
        dropped += [line.number for line in lines[position:found]]
        position = found + 1
    return dropped + [line.number for line in lines[position:]], adopted
