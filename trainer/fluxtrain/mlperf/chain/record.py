"""A record of the chain: one line of JSON that names the SHA-256 of the line before it.

    {"number": 7, "previous": "5c1f…", "kind": "line", "time_ms": 1700000000000, "text": ":::MLLOG {…}"}

The hash of a record is that of its line's bytes without the newline; that of the last one is the head.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

NONE_BEFORE = "0" * 64
"""What the first record names as the one before it."""
START, RESUME, LINE, DATA, WEIGHTS, CHECKPOINT, END = (
    *("start", "resume", "line", "data", "weights", "checkpoint", "end"),
)
"""Kinds: the first record; each later start of all ranks; a line of the log; the digests of the data sets; of
the initial weights; a complete checkpoint; the end of a process that closed a finished log."""
KINDS = (START, RESUME, LINE, DATA, WEIGHTS, CHECKPOINT, END)
_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Record:
    """A record; ``values`` are those of its kind."""

    number: int
    previous: str
    kind: str
    values: Mapping[str, Any]

    @property
    def text(self) -> str:
        """Return the line of the log, the empty string for other kinds."""
        text = self.values.get("text")
        return text if self.kind == LINE and isinstance(text, str) else ""

    @property
    def time(self) -> float | None:
        """Return the Unix time at which it was written, by the clock of rank 0's node; None without one."""
        milliseconds = self.values.get("time_ms")
        return milliseconds / 1000 if type(milliseconds) is int else None

    @property
    def dropped(self) -> frozenset[int]:
        """Return the numbers of the records whose lines a resume removed from the log."""
        return frozenset(number for number in _list(self.values, "dropped") if type(number) is int)

    @property
    def adopted(self) -> list[str]:
        """Return the lines that were in the log without a record when the run was resumed."""
        return [text for text in _list(self.values, "adopted") if isinstance(text, str)]


def encode(number: int, previous: str, kind: str, values: Mapping[str, object]) -> bytes:
    """Return the line of a record, without its newline."""
    record = {"number": number, "previous": previous, "kind": kind, **values}
    return json.dumps(record, separators=(",", ":")).encode("ascii")


def digest(line: bytes) -> str:
    """Return the hash of a record's line."""
    return hashlib.sha256(line).hexdigest()


def is_digest(value: object) -> bool:
    """Return whether ``value`` is a SHA-256 in lower-case hexadecimal digits."""
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def parse(line: bytes) -> Record:
    """Return the record in ``line``; raise ValueError if it is none."""
    try:
        values = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    number, previous, kind = (values.pop(name, None) for name in ("number", "previous", "kind"))
    if type(number) is not int or not is_digest(previous) or kind not in KINDS:
        raise ValueError("no number, hash and kind of a record")
    return Record(number, previous, kind, values)


def parsed(lines: Iterable[bytes]) -> list[Record | None]:
    """Return the record of each line, None for a line that is none."""
    records: list[Record | None] = []
    for line in lines:
        try:
            records.append(parse(line))
        except ValueError:
            records.append(None)
    return records


def split(content: bytes) -> tuple[list[bytes], bytes]:
    """Return the whole lines of a chain, and the bytes of a last one whose newline is missing."""
    *lines, torn = content.split(b"\n")
    return lines, torn


def _list(values: Mapping[str, Any], name: str) -> list[Any]:
    value = values.get(name)
    return value if isinstance(value, list) else []
