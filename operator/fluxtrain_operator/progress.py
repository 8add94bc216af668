"""Progress as the trainers report it, at /progress and in termination messages; validated, as untrusted."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fluxtrain.contract.resource.status import CheckpointStatus, ProgressStatus
from fluxtrain_operator.timestamps import stamp

_MAX_COUNT = 2**31 - 1
_MAX_SAMPLES = 2**53
_MAX_TIME = 253_402_300_799  # the last second of the year 9999


@dataclass(frozen=True)
class Progress:
    """The training's progress, its newest checkpoint, and the restarts of processes within pods."""

    status: ProgressStatus
    checkpoint: CheckpointStatus | None = None
    process_restarts: int = 0
    rank: int = 0
    phase: str = ""
    """One of the phases of `fluxtrain.contract.progress`; empty from older trainers."""
    alive_time: float | None = None
    """Unix time of the newest progress of any kind; None from older trainers."""
    num_nodes: int | None = None
    """Nodes that train together; None from older trainers."""
    train_seconds_before: float | None = None
    """Training time that the output already contained when these processes started."""

    @staticmethod
    def from_json(answer: object) -> Progress | None:
        """Return the progress in a decoded answer; invalid values are left out."""
        if not isinstance(answer, Mapping):
            return None
        step = _count(answer.get("checkpointStep"), _MAX_COUNT)
        time = _time(answer.get("checkpointTime"))
        return Progress(
            status=_status(answer),
            checkpoint=CheckpointStatus(step=step, time=time) if step else None,
            process_restarts=_count(answer.get("processRestarts"), _MAX_COUNT),
            rank=_count(answer.get("rank"), _MAX_COUNT),
            phase=phase if isinstance(phase := answer.get("phase"), str) else "",
            alive_time=_unix_time(answer.get("aliveTime")),
            num_nodes=_count(answer.get("numNodes"), _MAX_COUNT) or None,
            train_seconds_before=_number(answer.get("trainSecondsBefore")),
        )


def read_termination_message(message: object) -> tuple[str, Progress | None]:
    """Return the text of a container's termination ``message``, and its progress if it is rank 0's.

    If the agent wrote none, the message is the end of the container's log.
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
        step=_count(answer.get("step"), _MAX_COUNT),
        samples=_count(answer.get("samples"), _MAX_SAMPLES),
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
    """Return ``value`` rounded to six digits for the status; None if it is no finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # JSON integers are unbounded
        return None
    return float(f"{number:.6g}") if math.isfinite(number) else None


def _count(value: object, maximum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        return 0
    return min(max(value, 0), maximum)


def _time(value: object) -> str | None:
    time = _unix_time(value)
    return None if time is None else stamp(time)


def _unix_time(value: object) -> float | None:
    """Return ``value`` as a Unix time; None if it is not one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MAX_TIME:
        return None
    return float(value)
