"""Reads the samples of a raw ``cc12m-wds`` tar in order; incomplete samples count too.

Consecutive members with the same key are one sample, as in WebDataset and ``datasets``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path

from fluxtrain.data.open_files import read_bytes
from fluxtrain.data.tar.index import IMAGE_SUFFIXES, split_name
from fluxtrain.data.tar.members import Member, quoted, read_members
from fluxtrain.errors import DataError

NO_IMAGE, NO_CAPTION, TWICE = "no image", "no caption", "two images or two captions"
UNUSABLE = "unusable member"
_MOST_MEMBERS = 16
"""Members read of one sample; more are ignored."""


@dataclass(frozen=True)
class RawSample:
    """The members of one sample, or the ``fault``, with ``detail``, for which it cannot be used."""

    position: int
    key: str
    image: Member | None = None
    caption: Member | None = None
    fault: str | None = None
    detail: str = ""


@contextmanager
def open_raw_tar(path: Path) -> Iterator[RawTar]:
    """Yield the tar ``path``; DataError if it is missing."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    try:
        yield RawTar(path, file)
    finally:
        os.close(file)


class RawTar:
    """An open tar of samples; DataError, naming the tar, if it is not complete."""

    def __init__(self, path: Path, file: int) -> None:
        """Take the path and its open file descriptor."""
        self._path, self._file = path, file

    def samples(self) -> Iterator[RawSample]:
        """Yield the samples; DataError if the tar is incomplete."""
        grouped = groupby(self._members(), key=lambda member: split_name(member.name)[0])
        for position, (key, group) in enumerate(grouped):
            yield _sample(position, key, list(islice(group, _MOST_MEMBERS)))

    def read(self, member: Member) -> bytes:
        """Return the content of ``member``."""
        try:
            content = read_bytes(self._file, member.offset, member.size)
        except OSError as error:
            raise DataError(f"{self._path}: {error.strerror}") from None
        if len(content) < member.size:
            raise DataError(f"{self._path}: truncated while it was read")
        return content

    def _members(self) -> Iterator[Member]:
        """Yield the members that are parts of samples; DataError if one extends beyond the tar's end."""
        end = os.fstat(self._file).st_size
        for member in read_members(self._path):
            if member.offset + member.size > end:
                name = quoted(member.name)
                raise DataError(f"{self._path}: member {name} is cut off: not a whole tar")
            if _is_part(member.name):
                yield member


def _is_part(name: str) -> bool:
    """Return whether ``datasets`` counts the member as part of a sample; positions must agree with it."""
    return all(split_name(name)) and not name.rpartition("/")[2].startswith("__")


def _sample(position: int, key: str, members: list[Member]) -> RawSample:
    images = [member for member in members if split_name(member.name)[1] in IMAGE_SUFFIXES]
    captions = [member for member in members if split_name(member.name)[1] == "txt"]
    if len(images) > 1 or len(captions) > 1:
        return RawSample(position, key, fault=TWICE)
    if not images:
        return RawSample(position, key, fault=NO_IMAGE)
    if not captions:
        return RawSample(position, key, fault=NO_CAPTION)
    if detail := images[0].fault or captions[0].fault:
        return RawSample(position, key, fault=UNUSABLE, detail=detail)
    return RawSample(position, key, images[0], captions[0])
