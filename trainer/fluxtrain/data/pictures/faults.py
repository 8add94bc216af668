"""What was left out of shards and tables, kept beside the pictures that were written out of them."""

from __future__ import annotations

import json
from pathlib import Path

FAULTS = ".faults.json"
_MOST = 1000


class Faults:
    """Names with the reason, of which the first are kept."""

    def __init__(self) -> None:
        """Begin without any."""
        self.first: dict[str, str] = {}
        self._more = 0

    def add(self, name: str, reason: str) -> None:
        """Keep ``name``, or count it if there are many."""
        if len(self.first) < _MOST:
            self.first[name] = reason
        else:
            self._more += 1

    def example(self) -> str:
        """Return the end of a message, with the first of them."""
        first = next(iter(self.first.items()), None)
        return f"; {': '.join(first)}" if first else ""

    def write(self, folder: Path) -> None:
        """Write them to ``folder``, if there are some."""
        more = {"…": f"{self._more} more were left out"} if self._more else {}
        if self.first:
            (folder / FAULTS).write_text(json.dumps(self.first | more))


def read_faults(folder: Path) -> dict[str, str]:
    """Return what was left out of all shards and tables in ``folder``, with the reason."""
    found = dict[str, str]()
    for path in folder.glob(f"*/{FAULTS}"):
        faults = json.loads(path.read_text())
        found |= {f"{path.parent.name}/{name}": reason for name, reason in faults.items()}
    return dict(sorted(found.items()))
