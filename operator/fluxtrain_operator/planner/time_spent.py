"""How a job's time was spent: on steps that count, or lost and by what.

Trainers measure the time that they spend in each phase. What they do not cover is time without trainers. So
all parts together are the time since the job's start, without suspensions.
"""

from __future__ import annotations

from fluxtrain.contract.progress import (
    COMPILE,
    EVALUATE,
    IMPORT,
    LOAD,
    SAMPLE,
    SAVE,
    STEP,
    Phase,
)
from fluxtrain.contract.resource.status import ProgressStatus, Status, TimeSpent
from fluxtrain_operator.timestamps import seconds, stamp

_PARTS: dict[Phase, str] = {
    IMPORT: "start",
    LOAD: "start",
    COMPILE: "start",
    STEP: "step",
    EVALUATE: "evaluate",
    SAMPLE: "evaluate",
    SAVE: "save",
}
_OTHER = "other"
_ROUNDING = 1e-3
Parts = dict[str, float]
"""Seconds by field of `TimeSpent`."""


def next_time_spent(
    before: Status,
    progress: ProgressStatus | None,
    now: float,
    cause: str,
    train_seconds_before: float | None = None,
) -> TimeSpent | None:
    """Return the time spent until ``now``; None before the job's start.

    ``progress`` is the newest; ``cause`` the part of the time without trainers; ``train_seconds_before`` what
    the present processes resumed from.
    """
    start = seconds(before.start_time)
    if start is None:
        return None
    spent = before.time_spent or _of_older_operator(before, start)
    parts = _between(before.progress, progress, train_seconds_before)
    elapsed = int(now) - (seconds(spent.until) or now)
    parts[cause] = parts.get(cause, 0.0) + max(0.0, elapsed) - sum(parts.values())
    return _added(spent, parts, stamp(now))


def without_suspension(before: Status, now: float) -> TimeSpent | None:
    """Return the time spent of a job that was suspended until ``now``."""
    start = seconds(before.start_time)
    if start is None:
        return None
    spent = before.time_spent or _of_older_operator(before, start)
    return spent.model_copy(update={"until": stamp(now)})


def with_stall(spent: TimeSpent | None, phase: Phase | None, stalled: float) -> TimeSpent | None:
    """Return ``spent`` with the last ``stalled`` seconds in ``phase`` as lost."""
    if spent is None or phase is None:
        return spent
    part = _PARTS.get(phase, _OTHER)
    moved = min(stalled, getattr(spent, part))
    return _added(spent, {part: -moved, "stalled": moved}, spent.until)


def goodput(spent: TimeSpent | None) -> float | None:
    """Return the fraction of the time that was spent on steps that count; None without time or steps."""
    parts = _parts(spent) if spent is not None else {}
    total = sum(parts.values())
    return round(parts["step"] / total, 4) if total > 0 and parts["step"] > 0 else None


def _between(
    old: ProgressStatus | None, new: ProgressStatus | None, train_seconds_before: float | None
) -> Parts:
    """Return the time that trainers spent between two reports, which may be negative for ``step``."""
    if new is None or new == old:
        return {}
    same = old is not None and old.first_step_time == new.first_step_time
    if not new.phase_seconds:
        return _of_older_trainer(old, new)
    counted = old.phase_seconds if old is not None and same else {}
    parts: Parts = {}
    for phase, spent in new.phase_seconds.items():
        part = _PARTS.get(phase, _OTHER)  # type: ignore[call-overload]
        parts[part] = parts.get(part, 0.0) + spent - counted.get(phase, 0.0)
    if not same and old is not None and old.train_seconds is not None:
        _redo(parts, old, old.train_seconds - (train_seconds_before or 0.0))
    return parts


def _redo(parts: Parts, old: ProgressStatus, lost: float) -> None:
    """Move ``lost`` seconds of steps after the checkpoint to ``redone``, at most those of ``old``.

    Negative if the checkpoint is newer than the last report: then these steps were not counted yet.
    """
    lost = min(lost, old.phase_seconds.get(STEP, lost))  # without the compilation of the first
    parts["step"] = parts.get("step", 0.0) - lost
    parts["redone"] = max(0.0, lost)


def _of_older_trainer(old: ProgressStatus | None, new: ProgressStatus) -> Parts:
    trained = (new.train_seconds or 0.0) - ((old.train_seconds if old else None) or 0.0)
    return {"step": trained, "redone": max(0.0, -trained)}


def _of_older_operator(before: Status, start: float) -> TimeSpent:
    """Return the time of a job until its last report to an older operator: only the steps are known."""
    progress = before.progress
    if progress is None:
        return TimeSpent(until=stamp(start))
    pause = (c.last_transition_time for c in before.conditions if c.type == "Suspended")
    until = max(seconds(time) or start for time in (progress.last_step_time, *pause))
    active = max(0.0, until - start - (before.suspended_seconds or 0))
    trained = (progress.train_seconds or 0.0) - (before.train_seconds_before or 0.0)
    step = min(max(0.0, trained), active)
    return TimeSpent(until=stamp(until), step=step, other=active - step)


def _added(spent: TimeSpent, changes: Parts, until: str) -> TimeSpent:
    """Return ``spent`` with ``changes``; what a part lacks is taken from the time without trainers.

    The total grows by that of ``changes``, whatever trainers tell: beyond it, the largest part is cut.
    """
    parts = _parts(spent)
    total = max(0.0, sum(parts.values()) + sum(changes.values()))
    for name, change in changes.items():
        parts[name] += change
    for name in (*(part for part in parts if part not in ("start", "pending")), "start"):
        if parts[name] < 0:
            parts["pending"], parts[name] = parts["pending"] + parts[name], 0.0
    parts = {name: max(0.0, value) for name, value in parts.items()}
    while (excess := sum(parts.values()) - total) > _ROUNDING:
        largest = max(parts, key=lambda name: parts[name])
        parts[largest] -= min(excess, parts[largest])
    rounded = {name: round(value, 3) for name, value in parts.items()}
    return TimeSpent(until=until, **rounded)


def _parts(spent: TimeSpent) -> Parts:
    return spent.model_dump(exclude={"until"})
