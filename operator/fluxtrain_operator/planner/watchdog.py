"""The watchdog: a job has stalled if none of its ranks makes progress for longer than its phase allows.

A rank measures the time since its progress by its own monotonic clock. If it is frozen, its agent does, and
reports it through the rendezvous service. A job is never restarted because neither answers: a firewall or a
service mesh may be the cause, and the job may well train. Nor is it while a
lost node or the rendezvous pod is replaced: the peers of a lost node hang until the rendezvous service, which
may have been on that node too, ends their generation.
"""

from __future__ import annotations

import math

from fluxtrain.contract.process import (
    COMPILE,
    EVALUATE,
    IMPORT,
    LOAD,
    SAMPLE,
    SAVE,
    STEP,
    Phase,
    stall_seconds,
)
from fluxtrain.contract.resource.status import ProgressStatus, Status, TimeSpent
from fluxtrain_operator.base.names import seconds, stamp
from fluxtrain_operator.base.reports import Progress, RankProgress
from fluxtrain_operator.planner.observed import Pod
from fluxtrain_operator.planner.situation import Situation

_NO_ANSWER_SECONDS = 300.0  # longer than a start takes
REPORTED_BY_AGENTS = "ReportedByAgents"
"""Reason of a condition: only agents report ranks, as no trainer answers."""
_JOIN_SECONDS = 60.0
"""How long agents may take to join a rendezvous pod that has started: a DNS may cache its address for 30 s,
and the service needs some seconds to find out which agents are lost."""
_REPAIR_SECONDS = 300.0
"""A stall is acted on after this long even if nodes or the rendezvous pod are still being replaced."""
_MEASURABLE_SECONDS = 2.0
"""By this much one rank must have stopped before another one: ranks report their progress once a second."""


def progress_deadline(situation: Situation) -> float | None:
    """Return the Unix time by which progress is due; None without an answer, or with fewer pods than
    ``nodes.min``.

    It is the latest deadline of all ranks: one that saves may hold up others. It is extended while a node or
    the rendezvous pod is replaced, and until agents have had the time to join.
    """
    answer = situation.observed.any_progress
    if not situation.has_min_nodes or answer is None:
        return None
    ranks = _ranks(situation, answer)
    left = max(stall_timeout(situation, r) - r.seconds_since_progress for r in ranks)
    deadline = situation.now + left - answer.age
    return max(deadline, min(_repaired_time(situation), deadline + _REPAIR_SECONDS))


def _repaired_time(situation: Situation) -> float:
    """Return the Unix time from which no lost node explains a stall; infinite while one is replaced."""
    service = situation.observed.rendezvous
    lost = (pod for pod in situation.current if situation.unreachable(pod) and not pod.deleting)
    if service is None or service.deleting or not service.running or situation.unreachable(service):
        return math.inf
    if situation.is_outdated_rendezvous(service) or any(lost):
        return math.inf
    return max(service.created, service.started or 0.0) + _JOIN_SECONDS


def has_stalled(situation: Situation) -> bool:
    """Return whether a trainer answers and progress is overdue."""
    deadline = progress_deadline(situation)
    return deadline is not None and situation.now >= deadline


def stall_message(situation: Situation) -> str:
    """Return how long nothing has progressed, and the rank that stopped first with its place and stack."""
    answer = situation.observed.any_progress
    assert answer is not None, "only an answer can show a stall"
    ranks = _ranks(situation, answer)
    silent = min(rank.seconds_since_progress for rank in ranks) + answer.age
    first = _first_to_stop(ranks)
    stopped = "stopped first, in" if _is_distinct(first, ranks) else "is in"
    stack = f": {first.stack}" if first.stack else ""
    place = f"phase {first.phase} at step {first.step}{stack}"
    return f"no progress for {silent:.0f} s; rank {first.rank}{_where(situation, first)} {stopped} {place}"


def first_to_stop(situation: Situation) -> Pod | None:
    """Return the pod of the rank that stopped before all others; None if that is not known."""
    answer = situation.observed.any_progress
    if answer is None:
        return None
    ranks = _ranks(situation, answer)
    first = _first_to_stop(ranks)
    return _pod_of(situation, first) if _is_distinct(first, ranks) else None


def stall_timeout(situation: Situation, rank: RankProgress) -> float:
    """Return the seconds without progress after which ``rank`` counts as stalled."""
    learned = stall_seconds(rank.phase, rank.step_seconds)
    fixed = situation.job.spec.restart.no_progress_seconds
    if fixed is None:
        return learned
    is_stepping = rank.phase == STEP and rank.step_seconds is not None
    return float(fixed) if is_stepping else max(fixed, learned)


def no_answer_time(situation: Situation) -> float | None:
    """Return the Unix time from which it is reported that no trainer answers; None if one does."""
    answer = situation.observed.any_progress
    if not situation.has_min_nodes or (answer is not None and not answer.by_agents):
        return None
    joined = max(pod.started or 0.0 for pod in situation.running)
    last = situation.in_place_restart
    restarted = (seconds(last.time) if last is not None else None) or 0.0
    return max(joined, restarted, situation.last_step_time or 0.0) + _NO_ANSWER_SECONDS


def has_no_answer(situation: Situation) -> bool:
    """Return whether no trainer has answered for a while, though enough pods run."""
    since = no_answer_time(situation)
    return since is not None and situation.now >= since


def _ranks(situation: Situation, answer: Progress) -> tuple[RankProgress, ...]:
    """Return the ranks of ``answer``; if it reports none, one from the times of the trainer's own clock."""
    if answer.ranks:
        return answer.ranks
    joined = max(pod.started or 0.0 for pod in situation.running)
    last = max(joined, situation.last_step_time or 0.0)
    rate, batch = answer.status.samples_per_second, situation.job.config.schedule.global_batch_size
    has_stepped = (situation.last_step_time or 0.0) >= joined and bool(rate and rate > 0)
    rank = RankProgress(
        rank=answer.rank,
        phase=answer.phase or LOAD,
        step=answer.status.step,
        seconds_since_progress=situation.now - last - answer.age,
        step_seconds=batch / rate if rate and has_stepped else None,
    )
    return (rank,)


def _first_to_stop(ranks: tuple[RankProgress, ...]) -> RankProgress:
    """Return the rank with the fewest steps; of several, the one that has been silent the longest.

    One that is frozen comes first: others wait for it.
    """
    return min(
        ranks,
        key=lambda rank: (not rank.frozen, rank.step, -rank.seconds_since_progress, rank.rank),
    )


def _is_distinct(first: RankProgress, ranks: tuple[RankProgress, ...]) -> bool:
    """Return whether ``first`` stopped before all other ranks for certain."""
    others = [rank for rank in ranks if rank is not first]
    latest = first.seconds_since_progress - _MEASURABLE_SECONDS
    return bool(others) and all(
        first.step < rank.step or rank.seconds_since_progress < latest
        for rank in others
        if rank.frozen or not first.frozen
    )


def _pod_of(situation: Situation, rank: RankProgress) -> Pod | None:
    return next((pod for pod in situation.running if pod.uid == rank.pod), None)


def _where(situation: Situation, rank: RankProgress) -> str:
    pod = _pod_of(situation, rank)
    return "" if pod is None else f" of {pod.name} on {pod.node}"


# How a job's time was spent: on steps that count, or lost and by what.
#
# Trainers measure the time that they spend in each phase. What they do not cover is time without
# trainers. So all parts together are the time since the job's start, without suspensions.


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
    spent = before.time_spent or TimeSpent(until=stamp(start))
    parts = _between(before.progress, progress, train_seconds_before)
    elapsed = int(now) - (seconds(spent.until) or now)
    parts[cause] = parts.get(cause, 0.0) + max(0.0, elapsed) - sum(parts.values())
    return _added(spent, parts, stamp(now))


def without_suspension(before: Status, now: float) -> TimeSpent | None:
    """Return the time spent of a job that was suspended until ``now``."""
    start = seconds(before.start_time)
    if start is None:
        return None
    spent = before.time_spent or TimeSpent(until=stamp(start))
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
    if new is None or new == old or not new.phase_seconds:
        return {}
    same = old is not None and old.first_step_time == new.first_step_time
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
