"""The restarts of a job: what counts towards ``maxRestarts``, what is free, and by which cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fluxtrain.contract.members import PROCESS_FAILED
from fluxtrain.contract.resource.status import Restarts
from fluxtrain_operator.planner.decision import Decision
from fluxtrain_operator.planner.disruption import NODE_FAULTS, Delete, Reason
from fluxtrain_operator.planner.process_restarts import MAX_COUNT, first_counted
from fluxtrain_operator.planner.situation import Situation

_FREE_RESTARTS = ("GroupEnded",)
"""Reasons of restarts of all pods that the infrastructure caused; others are changes by the user."""
_MAX_CAUSES = 64


def next_restarts(
    situation: Situation, decision: Decision, attempt: int, deletions: Sequence[Delete] = ()
) -> Restarts:
    """Return the restarts after ``decision`` with its ``deletions``, in the ``attempt`` that follows.

    Each pod counts when its deletion is requested.
    """
    before, now = situation.job.status.restarts or Restarts(), situation.restarts
    causes = Counter(before.causes)
    causes.update(_process_causes(situation))
    is_free = decision.action == "restart" and decision.reason in _FREE_RESTARTS
    if decision.uses_restart or is_free:
        causes[decision.reason] += 1
    lost = [] if decision.action != "run" else _lost_causes(situation, deletions)
    causes.update(lost)
    is_charged = decision.uses_restart or decision.cause is Reason.PROGRAM_FAILED
    is_gang = is_charged and decision.action == "restart"
    return Restarts(
        process=now.process,
        pod=now.pod,
        gang=min(MAX_COUNT, now.gang + is_gang),
        charged=min(MAX_COUNT, situation.charged_restarts + decision.uses_restart),
        free=min(MAX_COUNT, before.free + len(lost) + is_free),
        causes={name: min(MAX_COUNT, n) for name, n in (+causes).most_common(_MAX_CAUSES)},
        counted=now.counted
        if attempt == situation.attempt
        else first_counted(attempt, now.process),
    )


def _process_causes(situation: Situation) -> Counter[str]:
    """Return how many restarts of processes are charged now, by the causes that agents tell."""
    charged = max(0, situation.charged_restarts - situation.charged_before)
    told = Counter([restart.cause for restart in situation.new_process_restarts][:charged])
    told[PROCESS_FAILED] += charged - told.total()  # no list: a forged status may have billions
    return told


def _lost_causes(situation: Situation, deletions: Sequence[Delete]) -> list[str]:
    """Return the reason of each current pod that the infrastructure took and that is deleted now."""
    faults = {d.uid: str(d.reason) for d in deletions if d.reason in NODE_FAULTS}
    faults |= {f.pod.uid: f.reason for f in situation.failures if f.infrastructure}
    deleted = {deletion.uid for deletion in deletions}
    pods = (pod for pod in situation.current if pod.uid in deleted and not pod.deleting)
    return [faults[pod.uid] for pod in pods if pod.uid in faults]
