"""Records by step as lines of JSON, continued after a resume: metrics.jsonl and the ledger; their losses."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Protocol

from fluxtrain.contract.run.closed_division import Violation
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
        self._file.close()


def drop_after(path: Path, step: int) -> None:
    """Remove the records of ``path`` after ``step`` and incomplete lines."""
    kept = [record for record in read_records(path) if record["step"] <= step]
    with atomic_write_by_several(path) as partial:
        partial.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")


def read_records(path: Path) -> list[Record]:
    """Return the complete records of ``path``; none if it does not exist."""
    records = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except ValueError:
            continue  # cut off when the process was killed, or damaged by a power cut
        if isinstance(record, dict) and type(record.get("step")) in (int, float):
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


RUN_LOG = "fluxtrain.mlperf.log:open_log"


class RunLog(Protocol):
    """Takes the events of a run on rank 0, each after ``samples`` training samples."""

    @property
    def band(self) -> tuple[float, float] | None:
        """Return the samples between which reference runs reach the run's target; None if unknown."""

    def data_opened(
        self, train_samples: int, eval_samples: int, digests: Mapping[str, str]
    ) -> None:
        """Take the sizes and the digests of the data sets."""

    def ready(self) -> None:
        """Take the start of the clock."""

    def block_start(self, samples: int) -> None:
        """Take the next step."""

    def tracked_stats(self, samples: int, stats: Mapping[str, float]) -> None:
        """Take the values of a step."""

    def eval_start(self, samples: int) -> None:
        """Take the end of steps, and the start of an evaluation."""

    def eval_accuracy(self, samples: int, loss: float, used: int | None = None) -> None:
        """Take its loss over ``used`` samples."""

    def eval_stop(self, samples: int) -> None:
        """Take its end."""

    def saved(self, step: int) -> None:
        """Take the complete checkpoint of ``step``; thread-safe."""

    def rule_broken(self, violation: Violation, samples: int) -> bool:
        """Take a broken rule of the closed division; return whether it changes the division."""

    def run_stop(self, status: str, samples: int) -> None:
        """Take the end of steps and of the run."""


EvaluationPoint = tuple[int, float]
"""Training samples and evaluation loss."""
_LAST = 6
_LEAST = 3
_MOST = 10.0
"""A target that is further away than this multiple of the samples so far is not forecast."""
_MOST_SAMPLES = 10**15
"""A log from elsewhere may state any number."""


def samples_to_target(
    evaluations: Sequence[EvaluationPoint], target: float | None, every: int
) -> int | None:
    """Return the samples, a multiple of ``every``, at which the loss reaches ``target``; None if unknown.

    The loss of the last evaluations is continued as a straight line over the logarithm of the samples, by
    least squares. Unknown with fewer than three evaluations at different samples, without a target, or if
    the loss does not fall.
    """
    points = [(samples, loss) for samples, loss in evaluations if 0 < samples < _MOST_SAMPLES]
    if target is None or not math.isfinite(target) or every < 1:
        return None
    if reached := next((samples for samples, loss in points if loss <= target), None):
        return reached
    points = points[-_LAST:]
    logs = [math.log(samples) for samples, _ in points]
    if len(set(logs)) < _LEAST or not all(math.isfinite(loss) for _, loss in points):
        return None
    mean_log = sum(logs) / len(logs)
    mean_loss = sum(loss for _, loss in points) / len(points)
    spread = sum((x - mean_log) ** 2 for x in logs)
    slope = sum((x - mean_log) * loss for x, (_, loss) in zip(logs, points, strict=True)) / spread
    now = points[-1][0]
    if not -math.inf < slope < 0 or (target - mean_loss) / slope + mean_log > math.log(_MOST * now):
        return None
    reached_at = math.exp(mean_log + (target - mean_loss) / slope)
    return max(math.ceil(reached_at / every) * every, now + every)
