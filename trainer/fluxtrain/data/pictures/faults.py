"""What was left out of shards and tables, kept with the pictures that were written out of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from fluxtrain.data.pictures.encodings import EXTENSIONS, HEAD_BYTES, LIKELY, likely_codecs
from fluxtrain.errors import one_line

UNREAD_TABLE = "is not read: a metadata file is metadata.jsonl, .csv or .parquet at the top"
FAULTS, LEFT_OUT = ".faults.json", ".left_out.json"
EMPTY = "holds no pictures"
"""Of a shard or a table; those that it held are named by themselves."""
_MOST = 1000
_REPEATED = re.compile(r"#\d+/")
_MORE = re.compile(r"(\d+) more were left out")


class Faults:
    """Names with the reason, of which the first are kept."""

    def __init__(self) -> None:
        self.first: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        """What is not read, but no picture is lost by it."""
        self._undecoded: dict[str, bytes] = {}
        self._more = 0

    def add(self, name: str, reason: str, content: bytes = b"") -> None:
        """Keep ``name``, or count it if there are many; ``content`` is a caption of another codec."""
        if len(self.first) < _MOST:
            self.first[name] = reason
            if content:
                self._undecoded[name] = content[:HEAD_BYTES]
        else:
            self._more += 1

    def leave_out(self, name: str, reason: str) -> None:
        """Keep ``name``, by which no picture is lost, unless there are many."""
        if len(self.left_out) < _MOST:
            self.left_out[name] = reason

    def example(self) -> str:
        """Return the end of a message, with the first of them."""
        first = next(iter(self.first.items()), None)
        return f"; {': '.join(first)}" if first else ""

    def write(self, folder: Path) -> None:
        """Write them to ``folder``, if there are some."""
        more = {"…": f"{self._more} more were left out"} if self._more else {}
        for name, codec in likely_codecs(self._undecoded).items():
            self.first[name] += f", {LIKELY} {codec}"
        for file, values in ((FAULTS, self.first | more), (LEFT_OUT, self.left_out)):
            if values:
                (folder / file).write_text(json.dumps(values), encoding="utf-8")


def unread_tables(left_out: Mapping[str, str], most: int) -> list[str]:
    """Return a line for each of the first ``most`` tables that may hold captions, and are not read."""
    names = (name for name, reason in left_out.items() if reason == UNREAD_TABLE)
    return [one_line(f"{name} {UNREAD_TABLE}") for name in islice(names, most)]


def read_faults(folder: Path, file: str = FAULTS) -> dict[str, str]:
    """Return what was left out of all shards and tables in ``folder``, with the reason.

    It is what counts as skipped, or with LEFT_OUT as ``file`` what does not.
    """
    found = dict[str, str]()
    for path in folder.glob(f"*/{file}"):
        faults = json.loads(path.read_text(encoding="utf-8"))
        found |= {f"{path.parent.name}/{name}": reason for name, reason in faults.items()}
    return dict(sorted(found.items()))


def num_lost(skipped: Mapping[str, str]) -> int:
    """Return the number of pictures that ``skipped`` stands for, names with the reason.

    The rest of a shard or a table stands for many, a text of a sample and an empty shard for none; a folder
    that a data set config has several times, with a number in its label, counts once.
    """
    texts, found = (*EXTENSIONS, ".json"), dict[str, int]()
    for name, reason in skipped.items():
        more = _MORE.fullmatch(reason)
        count = int(more[1]) if more else int(not name.rstrip("'").lower().endswith(texts))
        found[_REPEATED.sub("/", name)] = 0 if reason.startswith(EMPTY) else count
    return sum(found.values())
