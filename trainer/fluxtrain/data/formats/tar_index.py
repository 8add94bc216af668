"""The index of a tar: the spans of its samples, computed once and cached beside it in ``<tar>.index.json``.

The sidecar stores the tar's size and modification time; it is rebuilt if they differ or if it is malformed,
and not written if the folder is read-only.
Axes: n samples, m members of a sample.
"""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from fluxtrain.data.formats.tar import (
    MAX_MEMBER_BYTES,
    MAX_MEMBERS,
    Member,
    name_fault,
    open_regular,
    quoted,
    read_members,
)
from fluxtrain.errors import DataError

IMAGE_SUFFIXES = ("png", "jpg", "jpeg", "webp")
SIDECAR = ".index.json"
"""The suffix of a tar's index."""
UNFINISHED_SIDECARS = f".*{SIDECAR}.*.partial"
"""Glob pattern of the partial files that a killed process leaves."""
MAX_CAPTION_BYTES = 1 << 16
MAX_METADATA_BYTES = 1 << 20
MAX_SKIPPED = 100
"""Maximum number of stored messages about skipped members; the others are only counted."""
_FORMAT = 2
_MAX_JSON_BYTES = 1 << 24
"""Of a sidecar, some 200,000 samples; parsed, JSON takes at most some 30 times its size."""
_MAX_MESSAGE = 500
CacheKey = dict[str, int | str]
"""What must be equal for a sidecar to be used."""


@dataclass(frozen=True)
class MemberSpec:
    """One member of a sample, recognised by its suffix."""

    name: str
    article: str
    suffixes: tuple[str, ...]
    max_bytes: int = MAX_MEMBER_BYTES
    required: bool = True


@dataclass(frozen=True)
class SampleFormat:
    """The members of a sample; ``name`` is part of the cache key."""

    name: str
    members: tuple[MemberSpec, ...]

    @cached_property
    def by_suffix(self) -> dict[str, int]:
        """Return the number of the member with each suffix."""
        return {suffix: i for i, spec in enumerate(self.members) for suffix in spec.suffixes}


METADATA = MemberSpec("metadata", "", ("json",), MAX_METADATA_BYTES, required=False)
IMAGES = SampleFormat(
    "images",
    (
        MemberSpec("image", "an", IMAGE_SUFFIXES),
        MemberSpec("caption", "a", ("txt",), MAX_CAPTION_BYTES),
        METADATA,
    ),
)
"""An image, its caption and optional JSON metadata."""


@dataclass
class Skipped:
    """Skipped members and samples: the first messages, and the total count."""

    messages: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, message: str) -> None:
        """Count ``message``, and store it if there are few."""
        self.count += 1
        if len(self.messages) < MAX_SKIPPED:
            self.messages.append(message)


@dataclass(frozen=True)
class TarIndex:
    """The samples of one tar; a row of ``spans`` has the offset and the size of each member.

    Optional members that are missing have size 0.
    """

    keys: list[str]
    spans: Int64[np.ndarray[Any, Any], "n 2*m"]
    skipped: Skipped


def open_index(path: Path, sample_format: SampleFormat = IMAGES) -> TarIndex:
    """Return the index of the tar ``path``, from its sidecar if valid; DataError if it is not a whole tar."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    cache_key: CacheKey = {
        "format": _FORMAT,
        "kind": sample_format.name,
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
    }
    sidecar = path.with_name(f"{path.name}{SIDECAR}")
    try:
        return _read_sidecar(sidecar, cache_key, status.st_size, sample_format)
    except (OSError, ValueError, OverflowError, RecursionError):
        index = build_index(path, sample_format)
        _write_sidecar(sidecar, cache_key, index)
        return index


def build_index(
    path: Path, sample_format: SampleFormat = IMAGES, max_members: int = MAX_MEMBERS
) -> TarIndex:
    """Return the complete samples in the tar ``path``, in the order of their first members."""
    samples, skipped = dict[str, list[Member | None]](), Skipped()
    for member in read_members(path, max_members):
        fault = member.fault or _add_member(samples, member, sample_format)
        if fault:
            skipped.add(f"member {quoted(member.name)}: {fault}")
    keys, spans = list[str](), list[list[int]]()
    for key, members in samples.items():
        if missing := _missing(members, sample_format):
            skipped.add(f"sample {quoted(key)}: it has no {missing}")
        else:
            keys.append(key)
            spans.append([n for m in members for n in ((m.offset, m.size) if m else (0, 0))])
    table = np.array(spans, dtype=np.int64).reshape(-1, 2 * len(sample_format.members))
    return TarIndex(keys, table, skipped)


def split_name(name: str) -> tuple[str, str]:
    """Return key and suffix of a member, split as in WebDataset at the first dot of the file name."""
    folder, slash, last = name.rpartition("/")
    stem, _, suffix = last.partition(".")
    return f"{folder}{slash}{stem}" if stem else "", suffix.lower()


def _add_member(
    samples: dict[str, list[Member | None]], member: Member, sample_format: SampleFormat
) -> str | None:
    """Add ``member`` to its sample; return why it is skipped, or None."""
    key, suffix = split_name(member.name)
    if not key or suffix not in sample_format.by_suffix:
        return None  # not a member of a sample
    number = sample_format.by_suffix[suffix]
    spec = sample_format.members[number]
    name = f"{spec.article} {spec.name}"
    if member.size > spec.max_bytes:
        fault = f"{name} of {member.size} bytes, at most {spec.max_bytes} are read"
        return fault if spec.required else None
    members = samples.setdefault(key, [None] * len(sample_format.members))
    if members[number] is not None:
        return f"the key has {name} already" if spec.required else None
    members[number] = member
    return None


def _missing(members: list[Member | None], sample_format: SampleFormat) -> str | None:
    specs = zip(sample_format.members, members, strict=True)
    return next((s.name for s, member in specs if s.required and member is None), None)


def _read_sidecar(
    path: Path, cache_key: CacheKey, tar_size: int, sample_format: SampleFormat
) -> TarIndex:
    """Return the index in ``path``; ValueError if its key differs or it is malformed."""
    with open_regular(path) as file:
        size = os.fstat(file).st_size
        if size > _MAX_JSON_BYTES:
            raise ValueError("too large")
        content = json.loads(os.pread(file, size, 0))
    if not isinstance(content, dict) or any(
        content.get(name) != value for name, value in cache_key.items()
    ):
        raise ValueError("not of this tar")
    spans = _validate_spans(content.get("spans"), tar_size, sample_format)
    keys = content.get("keys")
    if not isinstance(keys, list) or len(keys) != len(spans) or any(map(_key_fault, keys)):
        raise ValueError("its keys are malformed")
    messages, count = content.get("skipped"), content.get("num_skipped")
    if not isinstance(messages, list) or type(count) is not int:
        raise ValueError("its skipped members are malformed")
    if len(messages) != min(count, MAX_SKIPPED) or not all(map(_is_message, messages)):
        raise ValueError("its skipped members are malformed")
    return TarIndex(keys, spans, Skipped(messages, count))


def _key_fault(key: object) -> str | None:
    return name_fault(key) if isinstance(key, str) else "not a text"


def _validate_spans(
    stored: object, size: int, sample_format: SampleFormat
) -> Int64[np.ndarray[Any, Any], "n 2*m"]:
    width = 2 * len(sample_format.members)
    if not isinstance(stored, list) or not all(_is_span(row, width) for row in stored):
        raise ValueError("its spans are malformed")
    spans = np.array(stored, dtype=np.int64).reshape(-1, width)
    offsets, sizes = spans[:, ::2], spans[:, 1::2]
    max_sizes = np.array([spec.max_bytes for spec in sample_format.members])
    # Bounded first, so that their sum cannot overflow.
    inside = (offsets >= 0) & (offsets <= size) & (sizes >= 0) & (sizes <= max_sizes)
    if not inside.all() or (offsets + sizes > size).any():
        raise ValueError("its spans are outside the tar")
    return spans


def _is_span(row: object, width: int) -> bool:
    # Checked before numpy converts it: one long string would give every element its length.
    return isinstance(row, list) and len(row) == width and all(type(v) is int for v in row)


def _is_message(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_MESSAGE and value.isprintable()


def _write_sidecar(path: Path, cache_key: CacheKey, index: TarIndex) -> None:
    """Write ``index`` to ``path`` if the folder is writable."""
    content = {
        **cache_key,
        "keys": index.keys,
        "spans": index.spans.tolist(),
        "skipped": index.skipped.messages,
        "num_skipped": index.skipped.count,
    }
    text = json.dumps(content)
    if len(text) > _MAX_JSON_BYTES:
        return
    # Several ranks may write at once, each a file of its own; O_EXCL does not follow symbolic links.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with open(
            os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "w", encoding="utf-8"
        ) as file:
            file.write(text)
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
