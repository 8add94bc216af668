"""Downloads one file: it grows as ``NAME.partial``, resumes, and is renamed when its checksum matches."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

from fluxtrain.prepare.download.manifest import PARTIAL, Entry
from fluxtrain.prepare.progress import Advance
from fluxtrain.remote.http import (
    CannotResumeError,
    DownloadError,
    HttpClient,
    RetryableError,
)

MAX_FILE_BYTES = 1 << 42
_MIN_GAIN_BYTES = 1 << 20
"""A failed attempt that added this much resets the count of attempts: large files take many."""
_MAX_RESTARTS = 2
"""Times that a partial file may be discarded."""


class ChecksumError(RetryableError):
    """The file is complete and its checksum is wrong."""


def fetch(
    entry: Entry, folder: Path, client: HttpClient, advance: Advance = lambda count: None
) -> Path:
    """Return the path of the file of ``entry`` in ``folder``, downloaded unless its checksum matches already.

    ``advance`` gets the number of bytes received. Raises DownloadError if it cannot be downloaded.
    """
    target = folder / entry.path
    if target.is_file() and digest_of(target, entry.algorithm) == entry.digest:
        return target
    if not target.parent.resolve().is_relative_to(folder.resolve()):
        raise DownloadError(f"{target.parent}: leads out of {folder} by a link; remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial_file = target.with_name(f"{target.name}{PARTIAL}")
    _download(entry, partial_file, client, advance)
    partial_file.replace(target)
    return target


def digest_of(path: Path, algorithm: str) -> str:
    """Return the checksum of the file ``path``, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, _hasher(algorithm)).hexdigest()


def _hasher(algorithm: str) -> Callable[[], Any]:
    return partial(hashlib.new, algorithm, usedforsecurity=False)  # against accidents only


def _download(entry: Entry, path: Path, client: HttpClient, advance: Advance) -> None:
    """Download to ``path``, with retries; DownloadError after too many."""
    attempt = restarts = max_size = 0
    while True:
        try:
            with open(path, "a+b", opener=_own_file) as file:
                _resume(entry, file, client, advance)
            return
        except (CannotResumeError, ChecksumError) as error:
            message = str(error)
            path.unlink()
            restarts, attempt = restarts + 1, attempt + 1
        except RetryableError as error:
            message, size = str(error), path.stat().st_size
            attempt = 1 if size - max_size >= _MIN_GAIN_BYTES else attempt + 1
            max_size = max(max_size, size)
        if attempt >= client.attempts or restarts > _MAX_RESTARTS:
            raise DownloadError(f"{entry.url}: {message}; tried {attempt} times")
        client.wait_before_retry(attempt)


def _own_file(path: str, flags: int) -> int:
    """Open ``path``; a link that somebody left there is removed, not followed."""
    if os.path.islink(path):
        os.unlink(path)
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _resume(entry: Entry, file: IO[bytes], client: HttpClient, advance: Advance) -> None:
    """Append the missing bytes to ``file``, check its checksum, and flush it to the disk."""
    file.seek(0)
    content: Any = file  # a BufferedRandom, which typeshed's protocol and IO[bytes] disagree on
    digest = hashlib.file_digest(content, _hasher(entry.algorithm))
    size = file.tell()
    if size and digest.hexdigest() == entry.digest:
        return
    with client.open(entry.url, size) as stream:
        if stream.start != size:
            file.truncate(0)
            size, digest = 0, _hasher(entry.algorithm)()
        limit = MAX_FILE_BYTES if stream.total is None else stream.total
        for block in stream.blocks(client.timeout, client.min_rate):
            size += len(block)
            if size > limit:
                raise RetryableError(f"more than {limit} bytes were sent")
            file.write(block)
            digest.update(block)
            advance(len(block))
    stream.require_total(size)
    if digest.hexdigest() != entry.digest:
        raise ChecksumError(
            f"its {entry.algorithm.upper()} is {digest.hexdigest()}, not {entry.digest}"
        )
    file.flush()
    os.fsync(file.fileno())
