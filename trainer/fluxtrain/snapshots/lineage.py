"""Which snapshots continue the run in an output folder: fences those of ranks that were left behind.

All ranks start together, and each start has a number (fence.py). A snapshot is accepted only if the newest
start took it, or loaded it and has taken none of its own yet. So neither ranks that the others started
without nor the memory of a run whose output was deleted can bring back their state.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from fluxtrain.files import atomic_write_by_several

LINEAGE_FILE = ".snapshots.json"


class SnapshotId(NamedTuple):
    """A snapshot: the start of the ranks that took it, and the step."""

    start: int
    step: int


@dataclass(frozen=True)
class Lineage:
    """The newest start of the ranks, and the snapshot that it loaded."""

    start: int = 0
    loaded_start: int = 0
    """0 if it loaded no snapshot."""
    loaded_step: int = 0

    def accepts(self, snapshot: SnapshotId) -> bool:
        """Return whether ``snapshot`` continues this run."""
        loaded = SnapshotId(self.loaded_start, self.loaded_step)
        return self.start > 0 and (snapshot.start == self.start or snapshot == loaded)


def read_lineage(output: Path) -> Lineage:
    """Return the lineage in ``output``; an empty one if there is none or it is unreadable."""
    try:
        return Lineage(**{key: int(value) for key, value in _values(output).items()})
    except (OSError, ValueError, TypeError, AttributeError):
        return Lineage()


def write_lineage(output: Path, lineage: Lineage) -> None:
    """Replace the lineage in ``output``."""
    with atomic_write_by_several(output / LINEAGE_FILE) as partial:
        partial.write_text(json.dumps(asdict(lineage)))


def _values(output: Path) -> dict[str, int]:
    values: dict[str, int] = json.loads((output / LINEAGE_FILE).read_text())
    return values
