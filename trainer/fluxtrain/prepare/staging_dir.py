"""A folder on its way to its name: it grows as ``OUTPUT.partial``, outlives SIGKILL, is renamed when whole.

A finished folder says in ``report.json`` with which settings it was made; a draft in ``settings.json``.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fluxtrain.data.tar.index import UNFINISHED_SIDECARS
from fluxtrain.errors import DataError, StorageError
from fluxtrain.files import atomic_write

Settings = dict[str, Any]
REPORT = "report.json"
_SETTINGS = "settings.json"
_WORK = "work"


class StagingDir:
    """What has been made of a data set so far; ``work`` is a folder beside it that goes in the end."""

    def __init__(self, output: Path, folder: Path) -> None:
        """Take the ``output`` to be and the ``folder`` that holds what is there already."""
        self.output, self.folder, self.work = output, folder, folder / _WORK

    def finish(self, report: dict[str, Any]) -> None:
        """Put the folder in the place of the output, with ``report``."""
        write_json(self.folder / REPORT, report)
        if self.output.exists():
            shutil.rmtree(self.output)
        self.folder.replace(self.output)
        _clear_up(self.output)


@contextmanager
def open_staging_dir(output: Path, settings: Settings, force: bool = False) -> Iterator[StagingDir]:
    """Yield the draft of ``output``, kept from before where it was begun with equal ``settings``.

    Raises DataError where ``output`` holds something else and not ``force``, StorageError where another
    process is at it.
    """
    output = output.resolve()
    if output.is_mount():
        raise DataError(f"{output}: a file system begins here; name a folder in it")
    if not force and _is_full(output):
        raise DataError(f"{output}: holds something else already; --force replaces it")
    folder = output.with_name(f"{output.name}.partial")
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(folder):
        if read_json(folder / _SETTINGS) != settings:
            _empty(folder)
            write_json(folder / _SETTINGS, settings)
        draft = StagingDir(output, folder)
        _remove_scratch(draft)
        with storage_errors(folder):
            yield draft


def finished_report(output: Path, settings: Settings) -> dict[str, Any] | None:
    """Return the report of ``output`` where it was made, whole, with ``settings``; else None."""
    report = read_json(output / REPORT)
    if not isinstance(report, dict) or report.get("settings") != settings:
        return None
    _clear_up(output)  # the last thing that a killed run left undone
    return report


@contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Turn a system's error into StorageError: what reads the input names its own errors."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{error.filename or folder}: {error.strerror or error}") from None


@contextmanager
def exclusive_lock(folder: Path) -> Iterator[None]:
    """Hold ``folder`` for this process alone; the kernel lets go of it however the process ends.

    Raises StorageError where another process holds it.
    """
    file = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise StorageError(f"{folder}: another process is writing here") from None
    except OSError:
        pass  # a file system without locks, such as some NFS: then it is the person's task
    try:
        yield
    finally:
        os.close(file)


def read_json(path: Path) -> Any:
    """Return what ``path`` holds, or None where it is missing or malformed."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` to ``path``, whole or not at all, on the disk when this returns."""
    with atomic_write(path) as partial, partial.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())


def _is_full(output: Path) -> bool:
    try:
        return any(output.iterdir())
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        raise DataError(f"{output}: not a folder") from None


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _remove_scratch(draft: StagingDir) -> None:
    """Make the work folder, and remove what a killed process was writing: folders there, indices of tars."""
    draft.work.mkdir(exist_ok=True)
    for path in draft.work.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
    for path in draft.folder.glob(UNFINISHED_SIDECARS):
        path.unlink(missing_ok=True)


def _clear_up(output: Path) -> None:
    shutil.rmtree(output / _WORK, ignore_errors=True)
    (output / _SETTINGS).unlink(missing_ok=True)
