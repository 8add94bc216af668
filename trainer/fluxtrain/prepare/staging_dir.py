"""The staging directory of a data set: it grows as ``OUTPUT.partial`` and is renamed when complete.

It survives SIGKILL, so the next run resumes. The settings are in ``settings.json`` of the staging directory
and in ``report.json`` of the complete output.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fluxtrain.data.tar.index import UNFINISHED_SIDECARS
from fluxtrain.errors import DataError, StorageError
from fluxtrain.files import atomic_write, exclusive_lock

Settings = dict[str, Any]
_REPORT = "report.json"
_SETTINGS = "settings.json"
_WORK = "work"


class StagingDir:
    """The directory ``path``, which becomes ``output``; scratch files go to ``work``."""

    def __init__(self, output: Path, path: Path) -> None:
        """Take the final and the staging path; nothing is created."""
        self.output, self.path, self.work = output, path, path / _WORK

    def finish(self, report: dict[str, Any]) -> None:
        """Write ``report`` and rename the directory to the output, which it replaces."""
        write_json(self.path / _REPORT, report)
        if self.output.exists():
            shutil.rmtree(self.output)
        self.path.replace(self.output)
        _remove_work(self.output)


@contextmanager
def open_staging_dir(output: Path, settings: Settings, force: bool = False) -> Iterator[StagingDir]:
    """Yield the staging directory of ``output``, emptied unless it was begun with equal ``settings``.

    Raises DataError if ``output`` is not empty and not ``force``, StorageError if another process is writing.
    """
    output = output.resolve()
    if output.is_mount():
        raise DataError(f"{output}: is a mount point; name a folder in it")
    if not force and _has_entries(output):
        raise DataError(f"{output}: is not empty; --force replaces it")
    path = output.with_name(f"{output.name}.partial")
    with storage_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(path), storage_errors(path):
        if read_json(path / _SETTINGS) != settings:
            _empty(path)
            write_json(path / _SETTINGS, settings)
        staging = StagingDir(output, path)
        _remove_scratch(staging)
        yield staging


def finished_report(output: Path, settings: Settings) -> dict[str, Any] | None:
    """Return the report of ``output`` if it is complete and was made with ``settings``, else None."""
    report = read_json(output / _REPORT)
    if not isinstance(report, dict) or report.get("settings") != settings:
        return None
    _remove_work(output)  # a run killed after the rename did not get to it
    return report


@contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Raise StorageError for any OSError; code that reads the input raises its own errors."""
    try:
        yield
    except OSError as error:
        written = error.filename2 or error.filename or folder  # of a copy the target is the second
        raise StorageError(f"{written}: {error.strerror or error}") from None


def read_json(path: Path) -> Any:
    """Return the content of ``path``, or None if it is missing or malformed."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` to ``path`` atomically and flush it to the disk."""
    with atomic_write(path) as partial, partial.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())


def _has_entries(output: Path) -> bool:
    try:
        return any(output.iterdir())
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        raise DataError(f"{output}: not a folder") from None


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _remove_scratch(staging: StagingDir) -> None:
    """Create the work folder; remove a killed process's folders in it and its unfinished tar indices."""
    staging.work.mkdir(exist_ok=True)
    for path in staging.work.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
    for path in staging.path.glob(UNFINISHED_SIDECARS):
        path.unlink(missing_ok=True)


def _remove_work(output: Path) -> None:
    shutil.rmtree(output / _WORK, ignore_errors=True)
    (output / _SETTINGS).unlink(missing_ok=True)
