"""Atomic writes, writes to disk, locks, and the size of a folder."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import re
import resource
import secrets
import time
import tomllib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    with _replacing(path, partial):
        yield partial


@contextmanager
def atomic_write_by_several(path: Path) -> Iterator[Path]:
    """As `atomic_write`, for a ``path`` that others may replace too: the temporary path is of this call."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with _replacing(path, partial):
            yield partial
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _replacing(path: Path, partial: Path) -> Iterator[None]:
    """Replace ``path`` by ``partial``; an error without a name, as of a full disk, gets that of ``path``."""
    try:
        yield
        partial.replace(path)
    except OSError as error:
        if error.filename in (None, str(partial)):
            error.filename = str(path)
        raise


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise StorageError, with ``path``, if what is inside cannot be written."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror})") from None


@contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Raise StorageError for any OSError; code that reads the input raises its own errors."""
    try:
        yield
    except OSError as error:
        written = error.filename2 or error.filename or folder  # of a copy the target is the second
        raise StorageError(f"{written}: {error.strerror or error}") from None


def write_to_disk(path: Path, text: str) -> None:
    """Write ``text`` to ``path``; return when it is on the disk."""
    path.write_text(text, encoding="utf-8")
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


BLOCK_BYTES = 1 << 24
_PIECE_BYTES = 1 << 20
"""Bytes that are read or written at once: they stay in the processor's cache for the checksum."""


@dataclass
class FileSums:
    """The size of a file and the CRC-32 of each of its blocks; bytes are added one after the other."""

    size: int = 0
    block_bytes: int = BLOCK_BYTES
    crc32: list[int] = field(default_factory=list)

    def add(self, content: memoryview) -> None:
        """Add the next bytes of the file."""
        while content:
            room = self.block_bytes - self.size % self.block_bytes
            if room == self.block_bytes:
                self.crc32.append(0)
            part = content[:room]
            self.crc32[-1] = zlib.crc32(part, self.crc32[-1])
            self.size += len(part)
            content = content[room:]

    def matches(self, content: bytes) -> bool:
        """Return whether ``content`` is the whole file."""
        return self == sums_of(content, self.block_bytes)


@dataclass(frozen=True)
class Block:
    """A part of a file, and its CRC-32."""

    file: str
    offset: int
    size: int
    crc32: int

    def is_whole_in(self, folder: Path) -> bool:
        """Return whether the file in ``folder`` holds these bytes; raises OSError if it cannot be read."""
        crc32, rest, buffer = 0, self.size, memoryview(bytearray(min(self.size, _PIECE_BYTES)))
        with (folder / self.file).open("rb", buffering=0) as file:
            file.seek(self.offset)
            while rest and (count := file.readinto(buffer[:rest])):
                crc32, rest = zlib.crc32(buffer[:count], crc32), rest - count
        return not rest and crc32 == self.crc32


class ChecksummedFile(io.FileIO):
    """A new file whose checksums are computed while it is written."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "w")
        self.sums = FileSums()

    def write(self, content: Any) -> int:
        """Write all bytes of ``content``; return their number."""
        view = memoryview(content).cast("B")
        for begin in range(0, len(view), _PIECE_BYTES):
            piece = view[begin : begin + _PIECE_BYTES]
            self.sums.add(piece)
            while piece:
                piece = piece[super().write(piece) :]
        return len(view)


def sums_of(content: bytes, block_bytes: int = BLOCK_BYTES) -> FileSums:
    """Return the checksums of a file that holds ``content``."""
    sums = FileSums(block_bytes=block_bytes)
    sums.add(memoryview(content))
    return sums


def blocks_of(files: Mapping[str, FileSums]) -> list[Block]:
    """Return the blocks of all ``files``, in the order of their names."""
    return [
        Block(name, offset, min(sums.block_bytes, sums.size - offset), crc32)
        for name, sums in sorted(files.items())
        for offset, crc32 in zip(range(0, sums.size, sums.block_bytes), sums.crc32, strict=True)
    ]


def encode(files: Mapping[str, FileSums]) -> str:
    """Return the checksums of ``files``, by name, as JSON; all have blocks of one size."""
    (block_bytes,) = {sums.block_bytes for sums in files.values()} or {BLOCK_BYTES}
    entries = {name: {"size": sums.size, "crc32": sums.crc32} for name, sums in files.items()}
    return json.dumps({"block_bytes": block_bytes, "files": entries})


def decode(text: str) -> dict[str, FileSums]:
    """Return the checksums of `encode`; raise ValueError if ``text`` is something else."""
    try:
        values = json.loads(text)
        block_bytes = _natural(values["block_bytes"])
        return {
            _plain_name(name): _file_sums(entry, block_bytes)
            for name, entry in values["files"].items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"no checksums ({error!r})") from None


def _file_sums(entry: Any, block_bytes: int) -> FileSums:
    size, crc32 = _natural(entry["size"]), [_natural(value) for value in entry["crc32"]]
    if block_bytes < 1 or len(crc32) != -(-size // block_bytes):
        raise ValueError(f"{len(crc32)} blocks of {block_bytes} bytes for {size} bytes")
    return FileSums(size, block_bytes, crc32)


def _natural(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{str(value)[:40]} is not a size or a checksum")
    return value


def _plain_name(name: str) -> str:
    if not name or Path(name).name != name:
        raise ValueError(f"{name[:40]!r} is not the name of a file")
    return name


# Parses TOML of strangers: a key of very many parts, for which tomllib takes hours, is refused.


_MAX_PARTS = 64
_PART = r"(?>[\w-]+|\"[^\"\n]*\"|'[^'\n]*')[ \t]*\.[ \t]*"
_LONG_KEY = re.compile(rf"(?<![\w-])(?>{_PART}){{{_MAX_PARTS}}}")


def parse_toml(text: str) -> dict[str, Any]:
    """Return the content of ``text``; ValueError, with the reason, if it is not TOML or nested too deeply."""
    if _LONG_KEY.search(text):
        raise ValueError(f"a key has more than {_MAX_PARTS} parts")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        hint = "; write \\ in a path as /" if re.match(r"Invalid hex|Unescaped", str(error)) else ""
        raise ValueError(f"{error}{hint}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


class _Descriptors:
    """Open descriptors of ``paths`` by number."""

    def __init__(self, paths: Sequence[Path], max_open: int) -> None:
        self._paths, self._max_open, self._open = paths, max_open, dict[int, int]()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without open descriptors, for another process."""
        return {**self.__dict__, "_open": {}}

    def __del__(self) -> None:
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
