"""What a place with files can do: list them, and send one from an offset on."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Protocol

from fluxtrain.remote.http import ByteStream

MAX_NAME = 1024


class RefusedError(Exception):
    """The store has no such file, or does not give it: another attempt would not help."""


class ChangedError(Exception):
    """The file is another one than that which was listed."""


@dataclass(frozen=True)
class RemoteFile:
    """One file of a store."""

    name: str
    """Path below the source, with slashes."""
    size: int
    """Bytes."""
    version: str = ""
    """ETag, hash or time of modification; "" if the store tells none."""
    digest: str = ""
    """``sha256:`` or ``git:`` and hexadecimal digits, if the store tells a hash of the content."""


class Store(Protocol):
    """The files of one source."""

    def files(self) -> list[RemoteFile]:
        """Return all files in the order of their names; RefusedError or RetryableError."""
        ...

    def open(self, file: RemoteFile, offset: int) -> AbstractContextManager[ByteStream]:
        """Yield the bytes of ``file`` from ``offset`` on, or from 0 if the store cannot skip any.

        Raises RefusedError, ChangedError or RetryableError.
        """
        ...


def name_fault(name: str) -> str | None:
    """Return why ``name`` must not be written below a folder, or None."""
    if not name.isprintable() or len(name) > MAX_NAME:
        return "its name has control characters, or is too long"
    parts = PurePosixPath(name).parts
    if name.startswith("/") or "\\" in name or ".." in parts or not parts:
        return "its name leads out of the folder"
    return None
