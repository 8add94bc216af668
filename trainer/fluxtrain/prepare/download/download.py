"""Downloads what a manifest names: in parallel, resumable, every file verified before it gets its name.

OUTPUT/path/of/file            whole and verified
OUTPUT/path/of/file.partial    on its way
OUTPUT/.verified               what has been verified, so that it is not read again
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Lock
from typing import TextIO

from tqdm import tqdm

from fluxtrain.prepare.download.file import fetch
from fluxtrain.prepare.download.http import DownloadError, HttpClient
from fluxtrain.prepare.download.manifest import VERIFIED, Entry, read_manifest
from fluxtrain.prepare.staging_dir import exclusive_lock, storage_errors

_MOST_SHOWN = 10
Advance = Callable[[int], None]


def download(
    manifest: str,
    output: Path,
    base: str | None = None,
    connections: int = 8,
    link: HttpClient | None = None,
    verify: bool = False,
    stream: TextIO = sys.stderr,
) -> int:
    """Bring the files of ``manifest`` to ``output``; return how many were not there and verified.

    With ``verify`` files that were verified before are read again. Raises DownloadError where a file
    cannot be had, after all the others, ConfigError and DataError where the manifest is bad.
    """
    link = link or HttpClient()
    entries = read_manifest(manifest, base, link)
    with storage_errors(output):
        output.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(output), storage_errors(output):
        ledger = _Ledger(output)
        wanted = [entry for entry in entries if verify or not ledger.holds(entry)]
        failed = _fetch_all(wanted, output, connections, link, ledger, stream)
    print(f"{output}: {len(entries) - len(failed)} of {len(entries)} files verified", file=stream)
    if failed:
        raise DownloadError(_told(failed, len(entries)))
    return len(wanted)


def _fetch_all(
    entries: list[Entry],
    output: Path,
    connections: int,
    link: HttpClient,
    ledger: _Ledger,
    stream: TextIO,
) -> list[str]:
    """Fetch ``entries``, enter them into ``ledger``, and return why some could not be had."""
    failed, stop = list[str](), Event()
    pool = ThreadPoolExecutor(connections)
    with _bytes_bar(stream, stop) as advance:
        try:
            begun: dict[Future[Path], Entry] = {
                pool.submit(fetch, entry, output, link, advance): entry for entry in entries
            }
            for future in as_completed(begun):
                try:
                    future.result()
                    ledger.enter(begun[future])
                except DownloadError as error:
                    failed.append(str(error))
        finally:  # on Ctrl-C or a full disk: begin no others, and leave those that are begun
            stop.set()
            pool.shutdown(cancel_futures=True)
    return failed


class _StoppedError(Exception):
    """Nobody waits for the file any more; what has come of it stays."""


class _Ledger:
    """Lines of MD5, size, time of change and path: what was verified and is as it was then."""

    def __init__(self, output: Path) -> None:
        self._output, self._path = output, output / VERIFIED
        self._lines = (
            set(self._path.read_text("utf-8").splitlines()) if self._path.exists() else set()
        )

    def holds(self, entry: Entry) -> bool:
        line = self._line(entry)
        return line is not None and line in self._lines

    def enter(self, entry: Entry) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{self._line(entry)}\n")

    def _line(self, entry: Entry) -> str | None:
        try:
            status = (self._output / entry.path).stat()
        except OSError:
            return None
        return f"{entry.md5} {status.st_size} {status.st_mtime_ns} {entry.path}"


@contextmanager
def _bytes_bar(stream: TextIO, stop: Event) -> Iterator[Advance]:
    """Yield what threads call with the bytes that came: a bar on a terminal, silence elsewhere.

    Once ``stop`` is set it ends the thread that calls it.
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


def _told(failed: list[str], total: int) -> str:
    lines = [f"{len(failed)} of {total} files could not be had; the same command tries again"]
    lines += sorted(failed)[:_MOST_SHOWN]
    if len(failed) > _MOST_SHOWN:
        lines.append(f"... and {len(failed) - _MOST_SHOWN} more")
    return "\n".join(lines)
