"""Fetches one file: it grows as ``NAME.partial``, resumes, and gets its name when it is whole."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from fluxtrain.remote.http import CannotResumeError, RetryableError
from fluxtrain.remote.store import RemoteFile, Store

PARTIAL = ".partial"
_MIN_GAIN_BYTES = 1 << 20
"""A failed attempt that added this much resets the count of attempts: large files take many."""
_READ_BYTES = 1 << 20
Result = TypeVar("Result")


class ExhaustedError(Exception):
    """All attempts have failed; the message is of the last."""


@dataclass(frozen=True)
class Patience:
    """How long a store is tried; times in seconds."""

    attempts: int = 5
    backoff: float = 1.0
    """Seconds before the second attempt; doubled before each later one."""
    timeout: float = 60.0
    min_rate: float = 1024.0
    """Bytes per second over ``timeout`` seconds, below which an attempt is given up."""
    check: Callable[[], object] = lambda: None
    """Called at each block and while waiting; what it raises ends the fetch."""

    def wait(self, attempt: int) -> None:
        """Wait after the failed attempt number ``attempt``, counted from 1."""
        end = time.monotonic() + min(60.0, self.backoff * 2 ** (attempt - 1))
        while (left := end - time.monotonic()) > 0:
            self.check()
            time.sleep(min(0.2, left))

    def tried(self, action: Callable[[], Result]) -> Result:
        """Return what ``action`` does, tried again after a RetryableError; ExhaustedError in the end."""
        for attempt in range(1, self.attempts + 1):
            try:
                return action()
            except RetryableError as error:
                message = str(error)
            if attempt < self.attempts:
                self.wait(attempt)
        raise ExhaustedError(f"{message}; tried {self.attempts} times")


def fetch(
    store: Store,
    file: RemoteFile,
    folder: Path,
    patience: Patience,
    advance: Callable[[int], object],
) -> None:
    """Fetch ``file`` into ``folder`` unless it is there; ``advance`` gets the number of bytes received.

    A partial file of an earlier process is continued: the caller names folders by the version of their files.
    Raises RefusedError, ChangedError or ExhaustedError.
    """
    target = folder / file.name
    if target.is_file() and file.size == target.stat().st_size:
        advance(file.size)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}{PARTIAL}")
    attempt = largest = received = 0

    def count(size: int) -> None:
        nonlocal received
        received += size
        advance(size)

    while True:
        try:
            with partial.open("a+b") as opened:
                _continue(store, file, opened, patience, count)
            break
        except RetryableError as error:
            message, size = str(error), partial.stat().st_size
            count(-received)
            if isinstance(error, CannotResumeError):
                partial.unlink()
            attempt = 1 if size - largest >= _MIN_GAIN_BYTES else attempt + 1
            largest = max(largest, size)
        if attempt >= patience.attempts:
            raise ExhaustedError(f"{file.name}: {message}; tried {attempt} times")
        patience.wait(attempt)
    os.utime(partial, ns=(0, 0))  # equal on all nodes: pictures are known by it
    partial.replace(target)


def _continue(
    store: Store,
    file: RemoteFile,
    opened: IO[bytes],
    patience: Patience,
    advance: Callable[[int], object],
) -> None:
    """Append the missing bytes to ``opened``, and compare size and hash."""
    size = opened.seek(0, os.SEEK_END)
    if size > file.size:
        raise CannotResumeError("the partial file is larger than the whole")
    advance(size)
    if size < file.size:
        with store.open(file, size) as stream:
            if stream.start != size:
                opened.truncate(0)
                advance(-size)
                size = 0
            for block in stream.blocks(patience.timeout, patience.min_rate):
                patience.check()
                size += len(block)
                if size > file.size:
                    raise CannotResumeError(f"more than {file.size} bytes were sent")
                opened.write(block)
                advance(len(block))
        if size != file.size:
            raise RetryableError(f"truncated: {size} of {file.size} bytes")
    opened.flush()
    os.fsync(opened.fileno())
    if file.digest and (found := _digest(opened, size, file.digest)) != file.digest:
        raise CannotResumeError(f"its hash is {found}, not {file.digest}")


def _digest(opened: IO[bytes], size: int, expected: str) -> str:
    """Return the hash of all of ``opened``, of the kind of ``expected``."""
    kind = expected.partition(":")[0]
    hasher: Any = hashlib.sha256() if kind == "sha256" else hashlib.sha1(usedforsecurity=False)
    if kind == "git":  # the hash of a blob covers a header
        hasher.update(b"blob %d\0" % size)
    opened.seek(0)
    while block := opened.read(_READ_BYTES):
        hasher.update(block)
    return f"{kind}:{hasher.hexdigest()}"
