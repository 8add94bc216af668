"""Downloads the files of a manifest in parallel; each is resumable, and verified before it gets its name.

OUTPUT/path/of/file            complete and verified
OUTPUT/path/of/file.partial    incomplete
OUTPUT/.verified               which files were verified, so that they are not read again
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Lock
from typing import TextIO

from tqdm import tqdm

from fluxtrain.files import exclusive_lock
from fluxtrain.prepare.download.file import fetch
from fluxtrain.prepare.download.manifest import VERIFIED, Entry, read_manifest
from fluxtrain.prepare.progress import Advance
from fluxtrain.prepare.staging_dir import storage_errors
from fluxtrain.remote.http import DownloadError, HttpClient

_MAX_FAILURES_SHOWN = 10


def download(
    manifest: str,
    output: Path,
    base: str | None = None,
    connections: int = 8,
    client: HttpClient | None = None,
    verify: bool = False,
    stream: TextIO = sys.stderr,
) -> int:
    """Download the files of ``manifest`` to ``output``; return how many were not verified before.

    With ``verify`` all files are read again. If a file cannot be downloaded, DownloadError is raised after
    all others are. Raises ConfigError or DataError if the manifest is malformed.
    """
    client = client or HttpClient()
    entries = read_manifest(manifest, base, client)
    with storage_errors(output):
        output.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(output), storage_errors(output):
        verified = _VerifiedFiles(output)
        missing = [entry for entry in entries if verify or not verified.contains(entry)]
        failures = _fetch_all(missing, output, connections, client, verified, stream)
    num_verified = len(entries) - len(failures)
    print(f"{output}: {num_verified} of {len(entries)} files verified", file=stream)
    if failures:
        raise DownloadError(_failure_message(failures, len(entries)))
    return len(missing)


def _fetch_all(
    entries: list[Entry],
    output: Path,
    connections: int,
    client: HttpClient,
    verified: _VerifiedFiles,
    stream: TextIO,
) -> list[str]:
    """Download ``entries``, add them to ``verified``, and return the error messages of those that failed."""
    failures, stop = list[str](), Event()
    pool = ThreadPoolExecutor(connections)
    with _bytes_bar(stream, stop) as advance:
        try:
            futures = {
                pool.submit(fetch, entry, output, client, advance): entry for entry in entries
            }
            for future in as_completed(futures):
                try:
                    future.result()
                    verified.add(futures[future])
                except DownloadError as error:
                    failures.append(str(error))
        finally:  # on Ctrl-C or a full disk: start no more, and stop the running ones
            stop.set()
            pool.shutdown(cancel_futures=True)
    return failures


class _StoppedError(Exception):
    """Ends a download thread; the partial file is kept."""


class _VerifiedFiles:
    """The file ``.verified``: a line of MD5, size, modification time and path for each verified file."""

    def __init__(self, output: Path) -> None:
        self._output, self._path = output, output / VERIFIED
        self._lines = (
            set(self._path.read_text("utf-8").splitlines()) if self._path.exists() else set()
        )

    def contains(self, entry: Entry) -> bool:
        """Return whether the file was verified and has not changed since."""
        line = self._line(entry)
        return line is not None and line in self._lines

    def add(self, entry: Entry) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{self._line(entry)}\n")

    def _line(self, entry: Entry) -> str | None:
        try:
            status = (self._output / entry.path).stat()
        except OSError:
            return None
        return f"{entry.digest} {status.st_size} {status.st_mtime_ns} {entry.path}"


@contextmanager
def _bytes_bar(stream: TextIO, stop: Event) -> Iterator[Advance]:
    """Yield a function that threads call with the number of bytes received; it advances a bar on a terminal.

    Once ``stop`` is set it raises in the calling thread.
    """
    lock = Lock()
    with tqdm(
        desc="download",
        unit="B",
        unit_scale=True,
        file=stream,
        leave=False,
        disable=not stream.isatty(),
    ) as bar:

        def advance(count: int) -> None:
            if stop.is_set():
                raise _StoppedError
            with lock:
                bar.update(count)

        yield advance


def _failure_message(failures: list[str], total: int) -> str:
    lines = [f"{len(failures)} of {total} files could not be downloaded; the same command retries"]
    lines += sorted(failures)[:_MAX_FAILURES_SHOWN]
    if len(failures) > _MAX_FAILURES_SHOWN:
        lines.append(f"... and {len(failures) - _MAX_FAILURES_SHOWN} more")
    return "\n".join(lines)
