"""Times of the status: start, suspensions, how the time was spent, and when progress alone is written."""

from __future__ import annotations

from zlib import crc32

from fluxtrain.contract.resource.status import Status, TimeSpent
from fluxtrain_operator import names
from fluxtrain_operator.planner.decision import Decision
from fluxtrain_operator.planner.observed import Pod
from fluxtrain_operator.planner.situation import Situation, true_since
from fluxtrain_operator.planner.time_spent import (
    goodput,
    next_time_spent,
    with_stall,
    without_suspension,
)
from fluxtrain_operator.timestamps import seconds, stamp

_WRITE_SECONDS, _WRITE_JITTER = 60.0, 0.25
"""Interval of two status writes for progress alone, and by which fraction of it jobs differ."""
_NEW_SECONDS, _NEW_WRITE_SECONDS = 300.0, 5.0
"""For how long, and how often, the status of new processes is written: someone may watch them."""


def start_time(situation: Situation, admitted: bool) -> str | None:
    """Return when a pod first passed all scheduling gates: time in a queue does not count."""
    before = situation.job.status.start_time
    started = admitted and any(not pod.gated for pod in situation.current)
    return before or (stamp(situation.now) if started else None)


def active_since(situation: Situation, decision: Decision, admitted: bool) -> str | None:
    """Return since when the job is active; None while it is not: until it starts, suspended, or in a queue.

    A pod that is refused or lost later ends no activity, else deadlines would begin anew with it.
    """
    is_queued = bool(situation.current) and all(map(_is_queued, situation.current))
    if decision.action in ("suspend", "wait") or is_queued:
        return None
    started = admitted and any(not pod.gated for pod in situation.current)
    known = situation.active_since
    return stamp(known if known is not None else situation.now) if known or started else None


def _is_queued(pod: Pod) -> bool:
    return pod.gated and names.KUEUE_GATE in pod.gates


def suspended_seconds(situation: Situation, decision: Decision) -> int | None:
    """Return the total length of all suspensions that have ended."""
    before, began = situation.job.status, true_since(situation.condition("Suspended"))
    if began is None or before.start_time is None or decision.action == "suspend":
        return before.suspended_seconds
    return (before.suspended_seconds or 0) + max(0, int(situation.now - began))


def train_seconds_before(situation: Situation) -> float | None:
    """Return the training time that the output contained before this job, as first reported."""
    before, latest = situation.job.status.train_seconds_before, situation.latest_progress
    return latest.train_seconds_before if before is None and latest is not None else before


def with_times(situation: Situation, decision: Decision, status: Status) -> Status:
    """Return ``status`` with the time spent; with the progress of before if its write is not due yet.

    The status is written on transitions, for the last progress of processes that have ended, and for other
    progress alone only from time to time.
    """
    before = situation.job.status
    times = {"time_spent": before.time_spent, "goodput": before.goodput, "eta": before.eta}
    told = {"progress": before.progress, "log_heads": before.log_heads}
    unchanged = status.model_copy(update={**times, **told})
    is_due = situation.now >= _write_time(situation) or _has_final_steps(situation)
    is_new = is_due and (status.progress, status.log_heads) != (before.progress, before.log_heads)
    if unchanged == before and not is_new:
        return unchanged
    spent = _time_spent(situation, decision, status)
    return status.model_copy(update={"time_spent": spent, "goodput": goodput(spent)})


def _has_final_steps(situation: Situation) -> bool:
    """Return whether processes that have ended tell more steps than the status has."""
    before, report = situation.job.status.progress, situation.report
    shown = before.step if before is not None else 0
    return report is not None and report.is_final and report.progress.status.step > shown


def _write_time(situation: Situation) -> float:
    """Return the Unix time from which progress alone is a reason to write the status.

    A job's uid spreads the writes of jobs that started together.
    """
    before, progress = situation.job.status, situation.progress
    last = seconds(before.time_spent.until) if before.time_spent is not None else None
    if last is None:
        return situation.now
    if progress is None or sum(progress.phase_seconds.values()) < _NEW_SECONDS:
        return last + _NEW_WRITE_SECONDS
    spread = crc32(situation.job.uid.encode()) / 2**32
    return last + _WRITE_SECONDS * (1 + _WRITE_JITTER * spread)


def _time_spent(situation: Situation, decision: Decision, status: Status) -> TimeSpent | None:
    before, latest = situation.job.status, situation.latest_progress
    started = before.model_copy(update={"start_time": status.start_time})
    if true_since(situation.condition("Suspended")) is not None:
        return without_suspension(started, situation.now)
    resumed_from = latest.train_seconds_before if latest is not None else None
    cause = _time_cause(situation, decision)
    spent = next_time_spent(started, status.progress, situation.now, cause, resumed_from)
    answer = situation.observed.any_progress
    if decision.reason != "NoProgress" or not decision.uses_restart or answer is None:
        return spent
    return with_stall(spent, answer.phase, answer.seconds_since_progress or 0.0)


def _time_cause(situation: Situation, decision: Decision) -> str:
    """Return what the time since the last write is lost by, as far as no trainer reports its phase."""
    if decision.action == "suspend":
        return "save"
    if situation.has_stepped and not (situation.progress and situation.progress.phase_seconds):
        return "other"  # an older trainer
    nodes = situation.job.status.nodes
    had_min_nodes = nodes is not None and nodes.ready >= situation.job.spec.nodes.min
    return "start" if had_min_nodes else "pending"
