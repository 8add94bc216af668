"""One file: it grows as ``NAME.partial``, goes on after any interruption, gets its name when its MD5 fits."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
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

Advance = Callable[[int], None]
MAX_FILE_BYTES = 1 << 42
_ENOUGH = 1 << 20
"""Bytes gained by an attempt that failed and yet counts as the first: large files take many."""
_RESTARTS = 2
"""Times that a file may turn out useless and begin anew, after other attempts or not."""
_MD5 = partial(hashlib.md5, usedforsecurity=False)  # MLCommons' choice: against accidents only


class ChecksumError(RetryableError):
    """The file is whole and another one."""


def fetch(
    entry: Entry, folder: Path, link: HttpClient, advance: Advance = lambda count: None
) -> Path:
    """Return the file of ``entry`` below ``folder``, with the right MD5; what is there already counts.

    ``advance`` is told of bytes as they come. Raises DownloadError where it cannot be had.
    """
    target = folder / entry.path
    if target.is_file() and md5_of(target) == entry.md5:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    growing = target.with_name(f"{target.name}{PARTIAL}")
    _complete(entry, growing, link, advance)
    growing.replace(target)
    return target


def md5_of(path: Path) -> str:
    """Return the MD5 of the file ``path``, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, _MD5).hexdigest()


def _complete(entry: Entry, growing: Path, link: HttpClient, advance: Advance) -> None:
    """Try until ``growing`` is the whole file; DownloadError after too many attempts in vain."""
    attempt = restarts = most = 0
    while True:
        try:
            with growing.open("a+b") as file:
                _go_on(entry, file, link, advance)
            return
        except (CannotResumeError, ChecksumError) as error:
            why = str(error)
            growing.unlink()
            restarts, attempt = restarts + 1, attempt + 1
        except RetryableError as error:
            why, size = str(error), growing.stat().st_size
            attempt = 1 if size - most >= _ENOUGH else attempt + 1
            most = max(most, size)
        if attempt >= link.attempts or restarts > _RESTARTS:
            raise DownloadError(f"{entry.url}: {why}; tried {attempt} times")
        link.pause(attempt)


def _go_on(entry: Entry, file: IO[bytes], link: HttpClient, advance: Advance) -> None:
    """Append to ``file`` what it lacks, and put it on the disk."""
    file.seek(0)
    content: Any = file  # a BufferedRandom, which typeshed's protocol and IO[bytes] disagree on
    digest = hashlib.file_digest(content, _MD5)
    size = file.tell()
    if size and digest.hexdigest() == entry.md5:
        return
    with link.open(entry.url, size) as transfer:
        if transfer.start != size:
            file.truncate(0)
            size, digest = 0, _MD5()
        most = MAX_FILE_BYTES if transfer.total is None else transfer.total
        for block in transfer.blocks(link.timeout, link.min_rate):
            size += len(block)
            if size > most:
                raise RetryableError(f"it sends more than {most} bytes")
            file.write(block)
            digest.update(block)
            advance(len(block))
    if transfer.total is not None and size != transfer.total:
        raise RetryableError(f"cut off: {size} of {transfer.total} bytes")
    if digest.hexdigest() != entry.md5:
        raise ChecksumError(f"its MD5 is {digest.hexdigest()}, the manifest says {entry.md5}")
    file.flush()
    os.fsync(file.fileno())
