"""Downloads one file: it grows as ``NAME.partial``, resumes, and is renamed when its MD5 matches."""

from __future__ import annotations

import hashlib
import os
from functools import partial
from pathlib import Path
from typing import IO, Any

from fluxtrain.prepare.download.http import (
    CannotResumeError,
    DownloadError,
    HttpClient,
    RetryableError,
)
from fluxtrain.prepare.download.manifest import PARTIAL, Entry
from fluxtrain.prepare.progress import Advance

MAX_FILE_BYTES = 1 << 42
_MIN_GAIN_BYTES = 1 << 20
"""A failed attempt that added this much resets the count of attempts: large files take many."""
_MAX_RESTARTS = 2
"""Times that a partial file may be discarded."""
_MD5 = partial(hashlib.md5, usedforsecurity=False)  # MLCommons' choice: against accidents only


class ChecksumError(RetryableError):
    """The file is complete and its MD5 is wrong."""


def fetch(
    entry: Entry, folder: Path, client: HttpClient, advance: Advance = lambda count: None
) -> Path:
    """Return the path of the file of ``entry`` in ``folder``, downloaded unless its MD5 matches already.

    ``advance`` gets the number of bytes received. Raises DownloadError if it cannot be downloaded.
    """
    target = folder / entry.path
    if target.is_file() and md5_of(target) == entry.md5:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial_file = target.with_name(f"{target.name}{PARTIAL}")
    _download(entry, partial_file, client, advance)
    partial_file.replace(target)
    return target


def md5_of(path: Path) -> str:
    """Return the MD5 of the file ``path``, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, _MD5).hexdigest()


def _download(entry: Entry, path: Path, client: HttpClient, advance: Advance) -> None:
    """Download to ``path``, with retries; DownloadError after too many."""
    attempt = restarts = max_size = 0
    while True:
        try:
            with path.open("a+b") as file:
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


def _resume(entry: Entry, file: IO[bytes], client: HttpClient, advance: Advance) -> None:
    """Append the missing bytes to ``file``, check its MD5, and flush it to the disk."""
    file.seek(0)
    content: Any = file  # a BufferedRandom, which typeshed's protocol and IO[bytes] disagree on
    digest = hashlib.file_digest(content, _MD5)
    size = file.tell()
    if size and digest.hexdigest() == entry.md5:
        return
    with client.open(entry.url, size) as stream:
        if stream.start != size:
            file.truncate(0)
            size, digest = 0, _MD5()
        limit = MAX_FILE_BYTES if stream.total is None else stream.total
        for block in stream.blocks(client.timeout, client.min_rate):
            size += len(block)
            if size > limit:
                raise RetryableError(f"more than {limit} bytes were sent")
            file.write(block)
            digest.update(block)
            advance(len(block))
    stream.require_total(size)
    if digest.hexdigest() != entry.md5:
        raise ChecksumError(f"its MD5 is {digest.hexdigest()}, in the manifest {entry.md5}")
    file.flush()
    os.fsync(file.fileno())
