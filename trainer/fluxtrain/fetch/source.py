"""What is at a URL, at one version: listed on one rank, fetched by every node.

A file grows as ``NAME.partial``, resumes, and gets its name when it is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Lock
from typing import IO, Any

from fluxtrain.errors import ConfigError, redacted
from fluxtrain.fetch.http import (
    ByteStream,
    CannotResumeError,
    DownloadError,
    ExhaustedError,
    HttpClient,
    RetryableError,
    RetryPolicy,
)
from fluxtrain.fetch.stores import (
    UNKNOWN,
    ChangedError,
    ChosenFiles,
    HttpStore,
    LocalStore,
    RefusedError,
    RemoteFile,
    Store,
    expanded,
    folder_of,
    name_fault,
    open_bucket,
    open_hub,
)

MAX_FILES = 1_000_000
_COMPRESSED = (".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".tar.bz2")
_POLL_SECONDS = 0.2
_KEY_DIGITS = 32
Advance = Callable[[int], object]
Use = Callable[[RemoteFile, Callable[[], object]], object]


@dataclass(frozen=True)
class Source:
    """The files of a URL."""

    field: str
    """Path of the field that names it, such as spec.run.data.images."""
    url: str
    """As it was given."""
    pinned: str
    """With the commit, on the Hub."""
    files: tuple[RemoteFile, ...]

    @property
    def local_folder(self) -> Path | None:
        """Return the folder of the files if they are on a volume of this node."""
        if "://" in self.url:
            return None
        if "{" in self.url:
            return Path(folder_of(self.url))
        path = Path(self.url)
        return path.parent if path.is_file() else path

    @property
    def size(self) -> int:
        """Return the bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def key(self) -> str:
        """Return a name of the files at these versions."""
        content = [self.url, *((file.name, file.size, file.version) for file in self.files)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:_KEY_DIGITS]

    def __str__(self) -> str:
        """Return the URL without credentials."""
        return redacted(self.url)


def list_source(
    field: str, url: str, wanted: Callable[[str], bool], policy: RetryPolicy, pinned: str = ""
) -> Source:
    """Return the files of ``url`` whose names are ``wanted``; ``pinned`` is the URL at the commit to use.

    Raises ConfigError if there are none, or access is denied, DownloadError if the store cannot be reached.
    """

    def files() -> tuple[str, list[RemoteFile]]:
        store, opened = open_store(pinned or url)
        return opened, store.files()

    try:
        opened, listed = policy.tried(files)
    except RefusedError as error:
        raise ConfigError(field, url, str(error)) from None
    except ExhaustedError as error:
        raise DownloadError(f"{field}: {redacted(url)}: {error}") from None
    kept = [file for file in listed if wanted(file.name)]
    if len(kept) > MAX_FILES:
        raise ConfigError(field, url, f"holds more than {MAX_FILES:,} files")
    for file in kept:
        if fault := name_fault(file.name):
            raise ConfigError(field, url, f"a file {file.name[:100]!r}: {fault}")
    if not listed:
        raise ConfigError(field, url, "there is nothing of this name, or it is empty")
    if not kept:
        text = (
            f"holds nothing that is read, only {len(listed)} other files, such as {listed[0].name}"
        )
        if any(file.name.lower().endswith(_COMPRESSED) for file in listed):
            text += "; compressed shards are not read: unpack them to .tar"
        raise ConfigError(field, url, text)
    return Source(field, url, opened, tuple(kept))


def open_store(url: str) -> tuple[Store, str]:
    """Return the store of ``url``, or of a path, and the URL at the version that it has now."""
    scheme, is_remote, _ = url.partition("://")
    if scheme in ("http", "https"):
        return HttpStore(tuple(expanded(url)), HttpClient()), url
    has_braces = "{" in url
    names = expanded(url) if has_braces or not is_remote else []
    folder = folder_of(url) if has_braces else url
    if not is_remote and Path(url).is_file():
        folder = str(Path(url).parent)
    store, opened = _open_folder(scheme if is_remote else "", folder)
    below = [name.removeprefix(f"{folder}/") for name in names if name != folder]
    if not below:
        return store, opened
    return ChosenFiles(store, tuple(below)), opened + url.removeprefix(folder)


def _open_folder(scheme: str, url: str) -> tuple[Store, str]:
    path = url.partition("://")[2]
    if scheme in ("s3", "gs", "az"):
        return open_bucket(scheme, path), url
    if scheme == "hf":
        hub = open_hub(path)
        return hub, f"hf://{hub.root}"
    return LocalStore(Path(url)), url


def fetch_source(
    source: Source,
    folder: Path,
    connections: int,
    policy: RetryPolicy,
    advance: Advance,
    use: Use = lambda file, check: None,
) -> None:
    """Fetch all files of ``source`` into ``folder``, several at the same time.

    ``use`` is called for each when it is there, in the thread that fetched it, with what it must call often.

    Raises ConfigError, naming the file, if one is refused or has changed, DownloadError if one cannot be
    fetched, and what ``policy.check`` raises.
    """
    try:
        store, _ = policy.tried(lambda: open_store(source.pinned))
        _fetch_all(store, source, folder, connections, policy, advance, use)
    except (ChangedError, RefusedError) as error:
        raise ConfigError(source.field, source.url, str(error)) from None
    except ExhaustedError as error:
        raise DownloadError(
            f"{source.field}: {source}: {error}; the same command resumes"
        ) from None


class _StoppedError(Exception):
    """Ends a thread; another has failed."""


def _fetch_all(
    store: Store,
    source: Source,
    folder: Path,
    connections: int,
    policy: RetryPolicy,
    advance: Advance,
    use: Use,
) -> None:
    stop, lock, remaining = Event(), Lock(), iter(source.files)

    def check() -> None:
        if stop.is_set():
            raise _StoppedError

    def work() -> None:
        while not stop.is_set():
            with lock:
                file = next(remaining, None)
            if file is None:
                return
            try:
                # one time of modification on all nodes: pictures are known by it
                fetch(store.open, file, folder, replace(policy, check=check), advance, modified=0)
            except (ChangedError, RefusedError) as error:
                raise type(error)(f"{file.name}: {error}") from None
            use(file, check)

    with ThreadPoolExecutor(connections, thread_name_prefix="fetch") as pool:
        pending = {pool.submit(work) for _ in range(min(connections, len(source.files)))}
        try:
            while pending:
                done, pending = wait(pending, _POLL_SECONDS, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                policy.check()
        finally:
            stop.set()


PARTIAL = ".partial"
MAX_FILE_BYTES = 1 << 42
_MAX_RESTARTS = 2
"""Times that a partial file may be discarded."""
_MIN_GAIN_BYTES = 1 << 20
"""A failed attempt that added this much resets the count of attempts: large files take many."""
_READ_BYTES = 1 << 20
OpenFile = Callable[[RemoteFile, int], AbstractContextManager[ByteStream]]
"""Opens a file of a store at an offset, as `Store.open` does."""


def fetch(
    open_file: OpenFile,
    file: RemoteFile,
    folder: Path,
    policy: RetryPolicy,
    advance: Callable[[int], object],
    modified: int | None = None,
) -> None:
    """Fetch ``file`` into ``folder`` unless it is there; ``advance`` gets the number of bytes received.

    A partial file of an earlier process is continued: the caller names folders by the version of their files.
    No link that somebody left in ``folder`` leads out of it. ``modified`` is the file's time of modification,
    in nanoseconds. Raises RefusedError, ChangedError or ExhaustedError.
    """
    target = folder / file.name
    if target.is_file() and file.size == target.stat().st_size:
        advance(file.size)
        return
    if not target.parent.resolve().is_relative_to(folder.resolve()):
        raise RefusedError(f"{target.parent}: leads out of {folder} by a link; remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}{PARTIAL}")
    attempt = largest = received = restarts = 0

    def count(size: int) -> None:
        nonlocal received
        received += size
        advance(size)

    while True:
        try:
            with open(partial, "a+b", opener=_own_file) as opened:
                _continue(open_file, file, opened, policy, count)
            break
        except RetryableError as error:
            message, size = str(error), partial.stat().st_size
            count(-received)
            if isinstance(error, CannotResumeError):
                partial.unlink()
                restarts += 1
            least = (
                _MIN_GAIN_BYTES if file.size == UNKNOWN else min(_MIN_GAIN_BYTES, file.size // 16)
            )
            attempt = 1 if size - largest >= max(1, least) else attempt + 1
            largest = max(largest, size)
        if attempt >= policy.attempts or restarts > _MAX_RESTARTS:
            raise ExhaustedError(f"{file.name}: {message}; tried {attempt} times")
        policy.wait(attempt)
    if modified is not None:
        os.utime(partial, ns=(modified, modified))
    partial.replace(target)


def _own_file(path: str, flags: int) -> int:
    """Open ``path``; a link that somebody left there is removed, not followed."""
    if os.path.islink(path):
        os.unlink(path)
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _continue(
    open_file: OpenFile,
    file: RemoteFile,
    opened: IO[bytes],
    policy: RetryPolicy,
    advance: Callable[[int], object],
) -> None:
    """Append the missing bytes to ``opened``, and compare size and hash."""
    size = opened.seek(0, os.SEEK_END)
    if size > file.size != UNKNOWN:
        raise CannotResumeError("the partial file is larger than the whole")
    advance(size)
    hasher = _hasher(file)
    opened.seek(0)
    while hasher is not None and (block := opened.read(_READ_BYTES)):
        hasher.update(block)
    kind, _, expected = file.digest.partition(":")
    is_whole = size > 0 and hasher is not None and hasher.hexdigest() == expected
    if not is_whole and size != file.size:
        with open_file(file, size) as stream:
            if stream.start != size:
                opened.truncate(0)
                advance(-size)
                size, hasher = 0, _hasher(file)
            total = stream.total if file.size == UNKNOWN else file.size
            limit = MAX_FILE_BYTES if total is None else total
            for block in stream.blocks(policy.timeout, policy.min_rate):
                policy.check()
                size += len(block)
                if size > limit:
                    raise CannotResumeError(f"more than {limit} bytes were sent")
                opened.write(block)
                if hasher is not None:
                    hasher.update(block)
                advance(len(block))
        if total is not None and size != total:
            raise RetryableError(f"truncated: {size} of {total} bytes")
    opened.flush()
    os.fsync(opened.fileno())
    if hasher is not None and (digest := hasher.hexdigest()) != expected:
        name = "hash" if kind == "git" else kind.upper()
        raise CannotResumeError(f"its {name} is {digest}, not {expected}")


def _hasher(file: RemoteFile) -> Any:
    """Return the hash of no bytes of ``file``, of the kind of its digest; None if it has none."""
    kind = file.digest.partition(":")[0]
    if kind == "git":  # the hash of a blob covers a header
        return hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
    return hashlib.new(kind, usedforsecurity=False) if kind else None
