"""Where the samples of a tar lie: found once, then kept beside it in ``<tar>.index.json``.

The sidecar says which size and time of change the tar had; it is rebuilt when they differ or when it
is anything but well formed, and does without where the folder is read-only.
Axes: n samples, s slots.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from fluxtrain.data.tar.members import (
    MAX_MEMBER_BYTES,
    MAX_MEMBERS,
    Member,
    name_fault,
    open_regular,
    read_members,
    shown,
)
from fluxtrain.errors import DataError

IMAGE_SUFFIXES = ("png", "jpg", "jpeg", "webp")
SIDECAR = ".index.json"
"""What the name of a tar's index adds to the tar's."""
UNFINISHED_SIDECARS = f".*{SIDECAR}.*.partial"
"""Pattern of what a killed process leaves of indices."""
MAX_CAPTION_BYTES = 1 << 16
MAX_METADATA_BYTES = 1 << 20
MAX_SKIPPED = 100
"""Most texts kept of skipped members; the rest are counted."""
_FORMAT = 2
_MAX_JSON_BYTES = 1 << 26
_MAX_TEXT = 500
Stamp = dict[str, int | str]


@dataclass(frozen=True)
class Slot:
    """One of the members that make up a sample, known by the endings of their names."""

    name: str
    article: str
    suffixes: tuple[str, ...]
    most_bytes: int = MAX_MEMBER_BYTES
    required: bool = True


@dataclass(frozen=True)
class Kind:
    """What a sample is made of; ``name`` tells the indices of different kinds apart."""

    name: str
    slots: tuple[Slot, ...]

    @cached_property
    def places(self) -> dict[str, int]:
        """Return the number of the slot that each suffix belongs to."""
        return {suffix: i for i, slot in enumerate(self.slots) for suffix in slot.suffixes}


METADATA = Slot("metadata", "", ("json",), MAX_METADATA_BYTES, required=False)
IMAGES = Kind(
    "images",
    (
        Slot("image", "an", IMAGE_SUFFIXES),
        Slot("caption", "a", ("txt",), MAX_CAPTION_BYTES),
        METADATA,
    ),
)
"""A picture and its caption."""


@dataclass
class Skipped:
    """What was passed over: the first texts and how many there are in all."""

    texts: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, text: str) -> None:
        """Count ``text``, and keep it while there are few."""
        self.count += 1
        if len(self.texts) < MAX_SKIPPED:
            self.texts.append(text)


@dataclass(frozen=True)
class TarIndex:
    """The samples of one tar: a row of ``spans`` is the offset and the size of each slot's member.

    What is not required and not there has size 0.
    """

    keys: list[str]
    spans: Int64[np.ndarray[Any, Any], "n 2*s"]
    skipped: Skipped


def open_index(path: Path, max_members: int = MAX_MEMBERS, kind: Kind = IMAGES) -> TarIndex:
    """Return the samples of ``kind`` in the tar ``path``; DataError where it is not a whole tar."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    stamp: Stamp = {
        "format": _FORMAT,
        "kind": kind.name,
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
    }
    sidecar = path.with_name(f"{path.name}{SIDECAR}")
    try:
        return _read_sidecar(sidecar, stamp, status.st_size, kind)
    except (OSError, ValueError, OverflowError, RecursionError):
        index = build_index(path, max_members, kind)
        _write_sidecar(sidecar, stamp, index)
        return index


def build_index(path: Path, max_members: int = MAX_MEMBERS, kind: Kind = IMAGES) -> TarIndex:
    """Return the samples of ``kind`` that are whole, in the order of their first members."""
    found, skipped = dict[str, list[Member | None]](), Skipped()
    for member in read_members(path, max_members):
        fault = member.fault or _place(found, member, kind)
        if fault:
            skipped.add(f"member {shown(member.name)}: {fault}")
    keys, spans = list[str](), list[list[int]]()
    for key, members in found.items():
        if missing := _missing(members, kind):
            skipped.add(f"sample {shown(key)}: it has no {missing}")
        else:
            keys.append(key)
            spans.append([n for m in members for n in ((m.offset, m.size) if m else (0, 0))])
    table = np.array(spans, dtype=np.int64).reshape(-1, 2 * len(kind.slots))
    return TarIndex(keys, table, skipped)


def split_name(name: str) -> tuple[str, str]:
    """Return key and suffix of a member: as WebDataset does, at the first dot of the last part."""
    folder, slash, last = name.rpartition("/")
    stem, _, suffix = last.partition(".")
    return f"{folder}{slash}{stem}" if stem else "", suffix.lower()


def _place(found: dict[str, list[Member | None]], member: Member, kind: Kind) -> str | None:
    """Enter a member of ``kind`` into ``found``; return why it is passed over, or None."""
    key, suffix = split_name(member.name)
    if not key or suffix not in kind.places:
        return None  # other kinds of members are none of ours
    number = kind.places[suffix]
    slot, place = kind.slots[number], found.get(key)
    if member.size > slot.most_bytes:
        fault = (
            f"{slot.article} {slot.name} of {member.size} bytes, at most {slot.most_bytes} are read"
        )
        return fault if slot.required else None
    if place is None:
        place = found[key] = [None] * len(kind.slots)
    if place[number] is not None:
        return f"the key has {slot.article} {slot.name} already" if slot.required else None
    place[number] = member
    return None


def _missing(members: list[Member | None], kind: Kind) -> str | None:
    """Return the first required slot that is empty, or None."""
    slots = zip(kind.slots, members, strict=True)
    empty = (slot.name for slot, member in slots if slot.required and member is None)
    return next(empty, None)


def _read_sidecar(path: Path, stamp: Stamp, tar_size: int, kind: Kind) -> TarIndex:
    """Return the index in ``path``; ValueError where it is another tar's or malformed."""
    with open_regular(path) as file:
        size = os.fstat(file).st_size
        if size > _MAX_JSON_BYTES:
            raise ValueError("too large")
        content = json.loads(os.pread(file, size, 0))
    if not isinstance(content, dict) or any(content.get(name) != stamp[name] for name in stamp):
        raise ValueError("not of this tar")
    keys, spans = content.get("keys"), _checked_spans(content.get("spans"), tar_size, kind)
    if not isinstance(keys, list) or len(keys) != len(spans) or any(map(_key_fault, keys)):
        raise ValueError("its keys are malformed")
    return TarIndex(keys, spans, _checked_skipped(content))


def _key_fault(key: object) -> str | None:
    return name_fault(key) if isinstance(key, str) else "not a text"


def _checked_spans(stored: object, size: int, kind: Kind) -> Int64[np.ndarray[Any, Any], "n 2*s"]:
    width = 2 * len(kind.slots)
    if not isinstance(stored, list) or not all(_is_span(row, width) for row in stored):
        raise ValueError("its spans are malformed")
    spans = np.array(stored, dtype=np.int64).reshape(-1, width)
    offsets, sizes = spans[:, ::2], spans[:, 1::2]
    most = np.array([slot.most_bytes for slot in kind.slots])
    # Both are bounded first, so that their sum cannot overflow.
    inside = (offsets >= 0) & (offsets <= size) & (sizes >= 0) & (sizes <= most)
    if not inside.all() or (offsets + sizes > size).any():
        raise ValueError("its spans lie outside the tar")
    return spans


def _is_span(row: object, width: int) -> bool:
    # Before numpy sees it: one long text among the rows would make an array of texts as long.
    return isinstance(row, list) and len(row) == width and all(type(v) is int for v in row)


def _checked_skipped(content: dict[str, Any]) -> Skipped:
    texts, count = content.get("skipped"), content.get("num_skipped")
    if not isinstance(texts, list) or type(count) is not int:
        raise ValueError("its skipped members are malformed")
    if not len(texts) == min(count, MAX_SKIPPED) or not all(map(_is_message, texts)):
        raise ValueError("its skipped members are malformed")
    return Skipped(texts, count)


def _is_message(text: object) -> bool:
    return isinstance(text, str) and len(text) <= _MAX_TEXT and text.isprintable()


def _write_sidecar(path: Path, stamp: Stamp, index: TarIndex) -> None:
    """Write ``index`` beside its tar where that can be done."""
    content = {
        **stamp,
        "keys": index.keys,
        "spans": index.spans.tolist(),
        "skipped": index.skipped.texts,
        "num_skipped": index.skipped.count,
    }
    text = json.dumps(content)
    if len(text) > _MAX_JSON_BYTES:
        return
    # Several ranks may write at once, each its own file; O_EXCL follows no link that lies in wait.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "w") as file:
            file.write(text)
        partial.replace(path)
    except OSError:
        _forget(partial)


def _forget(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return  # a read-only folder: the index stays in memory
