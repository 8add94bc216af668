"""Records by step as lines of JSON, continued after a resume: metrics.jsonl and the ledger."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fluxtrain.runtime.files import atomic_write_by_several

Record = dict[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """The mean loss at each of the eight timesteps (None if no sample has it), and the mean of these."""

    loss: float
    by_timestep: list[float | None]
    num_samples: int
    faults: tuple[str, ...] = ()
    """One sentence for each unreadable sample of all ranks."""


class Records:
    """A file of records by step, one JSON object a line; no step is repeated after a resume."""

    def __init__(self, path: Path, step: int) -> None:
        """Open ``path`` for appending after ``step``: later and incomplete lines are dropped."""
        drop_after(path, step)
        self._file = path.open("a", buffering=1)

    def write(self, record: Record) -> None:
        """Append ``record`` and flush it."""
        self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def drop_after(path: Path, step: int) -> None:
    """Remove the records of ``path`` after ``step`` and incomplete lines."""
    kept = [record for record in read_records(path) if record["step"] <= step]
    with atomic_write_by_several(path) as partial:
        partial.write_text("".join(json.dumps(record) + "\n" for record in kept))


def read_records(path: Path) -> list[Record]:
    """Return the complete records of ``path``; none if it does not exist."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except ValueError:
            continue  # cut off when the process was killed
        if isinstance(record, dict) and "step" in record:
            records.append(record)
    return records
