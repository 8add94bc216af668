"""The watchdog: a job has stalled if none of its ranks makes progress for longer than its phase allows.

A rank measures the time since its progress by its own monotonic clock. If it is frozen, its agent does, and
reports it through the rendezvous service. A job is never restarted because neither answers: a firewall or a
service mesh may be the cause, and the job may well train. Nor is it while a
lost node or the rendezvous pod is replaced: the peers of a lost node hang until the rendezvous service, which
may have been on that node too, tells their agents.
"""

from __future__ import annotations

import math

from fluxtrain.contract.progress import LOAD, STEP, stall_seconds
from fluxtrain_operator.planner.observed import Pod
from fluxtrain_operator.planner.situation import Situation
from fluxtrain_operator.progress import Progress, RankProgress
from fluxtrain_operator.timestamps import seconds

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
    """Return the ranks of ``answer``; from an older trainer one, from the times of its own clock."""
    if answer.ranks:
        return answer.ranks
    joined = max(pod.started or 0.0 for pod in situation.running)
    last = max(joined, situation.last_step_time or 0.0, answer.alive_time or 0.0)
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
