"""Several files in one URL or path, as ``shards-{000..009}.tar``."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice

from fluxtrain.remote.http import ByteStream
from fluxtrain.remote.store import RefusedError, RemoteFile, Store

MAX_FILES = 100_000
_RANGE = re.compile(r"\{(-?\d{1,20})\.\.(-?\d{1,20})")


def has_braces(url: str) -> bool:
    """Return whether ``url`` stands for several."""
    return "{" in url


def expanded(url: str) -> list[str]:
    """Return all that ``url`` stands for, as shells expand braces; RefusedError if it is malformed."""
    ranges = [abs(int(last) - int(first)) + 1 for first, last in _RANGE.findall(url)]
    if max(ranges, default=1) > MAX_FILES:  # the library makes all of a range at once
        raise _too_many()
    from braceexpand import braceexpand  # comes with webdataset

    try:
        found = list(islice(braceexpand(url), MAX_FILES + 1))
    except ValueError:
        raise RefusedError("its braces are not balanced") from None
    if len(found) > MAX_FILES:
        raise _too_many()
    return found


def folder_of(url: str) -> str:
    """Return the folder that holds all that ``url`` stands for."""
    return url.partition("{")[0].rpartition("/")[0]


def _too_many() -> RefusedError:
    return RefusedError(f"it stands for more than {MAX_FILES:,} files")


@dataclass(frozen=True)
class ChosenFiles:
    """Those of the files of ``store`` that have one of ``names``."""

    store: Store
    names: tuple[str, ...]

    def files(self) -> list[RemoteFile]:
        """Return all files in the order of their names; RefusedError if some are missing."""
        there = {file.name: file for file in self.store.files()}
        missing = [name for name in self.names if name not in there]
        if missing:
            more = f", and so are {len(missing) - 1} more" if len(missing) > 1 else ""
            raise RefusedError(f"{missing[0]} is missing{more}")
        return [there[name] for name in sorted(set(self.names))]

    def open(self, file: RemoteFile, offset: int) -> AbstractContextManager[ByteStream]:
        """Yield the bytes of ``file`` from ``offset`` on."""
        return self.store.open(file, offset)
