"""Records by step as lines of JSON, gone on with after a resume: metrics.jsonl and the ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fluxtrain.files import atomic_write

Record = dict[str, Any]


class Records:
    """A file of records by step: one object a line; after a resume no step stands twice."""

    def __init__(self, path: Path, step: int) -> None:
        """Open ``path`` to go on after ``step``: later and torn lines are dropped."""
        self.path = path
        drop_after(path, step)
        self._file = path.open("a", buffering=1)

    def write(self, record: Record) -> None:
        """Append ``record`` as one line, at once."""
        self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def drop_after(path: Path, step: int) -> None:
    """Remove the records of ``path`` after ``step``, and what a kill left half written."""
    kept = [record for record in read_records(path) if record["step"] <= step]
    with atomic_write(path) as partial:
        partial.write_text("".join(json.dumps(record) + "\n" for record in kept))


def read_records(path: Path) -> list[Record]:
    """Return the records of a metrics.jsonl that are whole; none where there is no file."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except ValueError:
            continue  # torn by a kill
        if isinstance(record, dict) and "step" in record:
            records.append(record)
    return records
