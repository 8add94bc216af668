"""Records by step as lines of JSON, continued after a resume: metrics.jsonl and the ledger; their losses."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from fluxtrain.runtime.files import atomic_write_by_several

Record = dict[str, Any]
Point = tuple[float, float]
"""Training samples and a loss."""
_NEAR = 9
"""Points on each side of one that is smoothed."""


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
        self._file = path.open("a", buffering=1, encoding="utf-8")

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
        partial.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")


def read_records(path: Path) -> list[Record]:
    """Return the complete records of ``path``; none if it does not exist."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except ValueError:
            continue  # cut off when the process was killed
        if isinstance(record, dict) and "step" in record:
            records.append(record)
    return records


def losses(records: Iterable[Record], key: str) -> list[Point]:
    """Return the samples and the losses of ``records`` with a finite loss above 0 at ``key``."""
    found = [(record["samples"], record.get(key)) for record in records if key in record]
    return [
        (float(samples), float(loss))
        for samples, loss in found
        if isinstance(loss, int | float) and math.isfinite(loss) and loss > 0
    ]


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Return the mean of the line through ``points`` in a window around each, of equal width on both sides.

    The window has at most nine points on a side and is narrower at the ends. A straight line stays as it is,
    at any distances between the points. Of points at the same samples the last one counts.
    """
    points = sorted(dict(points).items())
    samples, last = [at for at, _ in points], len(points) - 1
    parts = [(b - a) * (low + high) / 2 for (a, low), (b, high) in pairwise(points)]
    areas = [0.0, *accumulate(parts)]

    def area(at: float) -> float:
        """Return the area below the line from the first point to ``at``."""
        index = min(max(bisect_right(samples, at), 1), last) - 1
        (begin, loss), (end, next_loss) = points[index : index + 2]
        rise = (next_loss - loss) * (at - begin) / (end - begin)
        return areas[index] + (at - begin) * (loss + rise / 2)

    result = []
    for index, (at, loss) in enumerate(points):
        near = min(_NEAR, index, last - index)
        half = min(at - samples[index - near], samples[index + near] - at)
        mean = (area(at + half) - area(at - half)) / (2 * half) if half else loss
        result.append((at, mean))
    return result
