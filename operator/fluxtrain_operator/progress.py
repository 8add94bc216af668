"""What rank 0 says of itself, at /progress and as it ends, read with suspicion: it may say anything."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fluxtrain.contract.resource.status import CheckpointStatus, ProgressStatus
from fluxtrain_operator.timestamps import stamp

_LARGEST_COUNT = 2**31 - 1
_LARGEST_SAMPLES = 2**53
_LATEST = 253_402_300_799  # the last second of the year 9999


@dataclass(frozen=True)
class Progress:
    """How far the training is, the newest checkpoint, and the restarts inside living pods."""

    status: ProgressStatus
    checkpoint: CheckpointStatus | None = None
    process_restarts: int = 0
    rank: int = 0
    phase: str = ""
    """What the trainer does: one of the phases of `fluxtrain.contract`, empty from older trainers."""
    alive: float | None = None
    """Unix time of the last sign of progress of any kind; None from older trainers."""
    num_nodes: int | None = None
    """Nodes that train together; None from older trainers."""
    train_seconds_before: float | None = None
    """Training time that these processes found in the output."""

    @staticmethod
    def from_json(answer: object) -> Progress | None:
        """Return the progress in a decoded answer; values that are none are left out."""
        if not isinstance(answer, Mapping):
            return None
        count = _count(answer.get("checkpointStep"), _LARGEST_COUNT)
        time = _time(answer.get("checkpointTime"))
        return Progress(
            status=_status(answer),
            checkpoint=CheckpointStatus(step=count, time=time) if count else None,
            process_restarts=_count(answer.get("processRestarts"), _LARGEST_COUNT),
            rank=_count(answer.get("rank"), _LARGEST_COUNT),
            phase=phase if isinstance(phase := answer.get("phase"), str) else "",
            alive=_moment(answer.get("aliveTime")),
            num_nodes=_count(answer.get("numNodes"), _LARGEST_COUNT) or None,
            train_seconds_before=_number(answer.get("trainSecondsBefore")),
        )


def read_termination_message(message: object) -> tuple[str, Progress | None]:
    """Return the text in a container's termination ``message``, and the progress where it was rank 0's.

    Where the agent came to write none, the message is the end of the container's log.
    """
    if not isinstance(message, str):
        return "", None
    try:
        values = json.loads(message)
    except (ValueError, RecursionError):
        return message, None
    if not isinstance(values, Mapping):
        return message, None
    progress = Progress.from_json(values) if values.get("rank") == 0 else None
    return str(values.get("message") or ""), progress


def _status(answer: Mapping[str, Any]) -> ProgressStatus:
    return ProgressStatus(
        step=_count(answer.get("step"), _LARGEST_COUNT),
        samples=_count(answer.get("samples"), _LARGEST_SAMPLES),
        trainLoss=_number(answer.get("trainLoss")),
        evalLoss=_number(answer.get("evalLoss")),
        samplesPerSecond=_number(answer.get("samplesPerSecond")),
        mfu=_number(answer.get("mfu")),
        remainingSeconds=_number(answer.get("remainingSeconds")),
        trainSeconds=_number(answer.get("trainSeconds")),
        firstStepTime=_time(answer.get("firstStepTime")),
        lastStepTime=_time(answer.get("lastStepTime")),
    )


def _number(value: object) -> float | None:
    """Return ``value`` to six digits, as status needs no more; None for NaN and what is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:  # JSON's whole numbers have no end
        return None
    return float(f"{found:.6g}") if math.isfinite(found) else None


def _count(value: object, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        return 0
    return min(max(value, 0), most)


def _time(value: object) -> str | None:
    moment = _moment(value)
    return None if moment is None else stamp(moment)


def _moment(value: object) -> float | None:
    """Return ``value`` as a Unix time; None for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _LATEST:
        return None
    return float(value)
