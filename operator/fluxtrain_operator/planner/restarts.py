"""The restarts of a job: what counts towards ``maxRestarts``, what is free, and by which cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fluxtrain.contract.process import PROCESS_FAILED
from fluxtrain.contract.resource.status import (
    MAX_COUNTED_PODS,
    MAX_REPLACED_PODS,
    CountedRestarts,
    InPlaceRestart,
    PodReplacement,
    Restarts,
)
from fluxtrain_operator.base import names
from fluxtrain_operator.base.names import seconds, stamp
from fluxtrain_operator.base.reports import RankProgress
from fluxtrain_operator.planner.groups import release_deadline
from fluxtrain_operator.planner.guard import NODE_FAULTS, Delete, Failure, Reason
from fluxtrain_operator.planner.observed import Pod
from fluxtrain_operator.planner.situation import MAX_COUNT, Decision, Situation

_FREE_RESTARTS = ("GroupEnded",)
"""Reasons of restarts of all pods that the infrastructure caused; others are changes by the user."""
_MAX_CAUSES = 64
_MAX_GONE = 16


def next_restarts(
    situation: Situation, decision: Decision, attempt: int, deletions: Sequence[Delete] = ()
) -> Restarts:
    """Return the restarts after ``decision`` with its ``deletions``, in the ``attempt`` that follows.

    Each pod counts once: when its deletion is requested, or when it is seen that others have disrupted it.
    """
    before, now = situation.job.status.restarts or Restarts(), situation.restarts
    causes = Counter(before.causes)
    causes.update(_process_causes(situation))
    is_free = _is_free(situation, decision)
    if decision.uses_restart or is_free:
        causes[_kueue_reason(situation) if is_free else decision.reason] += 1
    lost = new_losses(situation, decision, deletions)
    causes.update(reason for _, reason in lost)
    is_charged = decision.uses_restart or decision.cause is Reason.PROGRAM_FAILED
    is_gang = is_charged and decision.action == "restart"
    return Restarts(
        process=now.process,
        pod=now.pod,
        gang=min(MAX_COUNT, now.gang + is_gang),
        charged=min(MAX_COUNT, situation.charged_restarts + decision.uses_restart),
        free=min(MAX_COUNT, before.free + len(lost) + is_free),
        causes={name: min(MAX_COUNT, n) for name, n in (+causes).most_common(_MAX_CAUSES)},
        countedPods=_counted_pods(situation, [pod for pod, _ in lost]),
        counted=now.counted
        if attempt == situation.attempt
        else CountedRestarts(attempt=attempt, process=now.process),
    )


def _process_causes(situation: Situation) -> Counter[str]:
    """Return how many restarts of processes are charged now, by the causes that agents tell."""
    before = situation.job.status.restarts or Restarts()
    charged = max(0, situation.charged_restarts - before.charged)
    causes = Counter([restart.cause for restart in situation.new_process_restarts][:charged])
    causes[PROCESS_FAILED] += charged - causes.total()  # no list: a forged status may have billions
    return causes


def new_losses(
    situation: Situation, decision: Decision, deletions: Sequence[Delete]
) -> list[tuple[Pod, str]]:
    """Return each current pod that the infrastructure has taken and that is not counted yet, and why.

    One that others disrupt may be gone before the operator plans; a job that holds no pods loses none.
    """
    if decision.action in ("suspend", "complete", "fail"):
        return []
    taken = [(pod, pod.disruption) for pod in _disrupted(situation)]
    if decision.action == "run":
        faults = {d.uid: str(d.reason) for d in deletions if d.reason in NODE_FAULTS}
        faults |= {f.pod.uid: f.reason for f in situation.failures if f.infrastructure}
        deleted = {deletion.uid for deletion in deletions}
        pods = (pod for pod in situation.current if pod.uid in deleted and not pod.deleting)
        taken += [(pod, faults[pod.uid]) for pod in pods if pod.uid in faults]
    known = set(_known_pods(situation))
    return [(pod, reason) for pod, reason in taken if _short(pod) not in known][:MAX_COUNTED_PODS]


def _disrupted(situation: Situation) -> list[Pod]:
    """Return the pods of this attempt that others delete, or have deleted, for a disruption."""
    deleting = [pod for pod in situation.current if pod.deleting]
    return [pod for pod in (*deleting, *_gone(situation)) if pod.disruption]


def _gone(situation: Situation) -> list[Pod]:
    present = {pod.uid for pod in situation.observed.pods}
    gone = situation.observed.gone
    return [pod for pod in gone if pod.attempt == situation.attempt and pod.uid not in present]


def _is_free(situation: Situation, decision: Decision) -> bool:
    """Return whether the infrastructure caused a restart of all pods, which no lost pod counts for."""
    is_caused = decision.action == "restart" and decision.reason in _FREE_RESTARTS
    return is_caused and not _disrupted(situation)


def _kueue_reason(situation: Situation) -> str:
    """Return why Kueue has stopped the group, else that it has ended."""
    stopped = (pod.queue_stop for pod in (*situation.current, *_gone(situation)))
    return next((reason for reason in stopped if reason), str(Reason.GROUP_ENDED))


def _counted_pods(situation: Situation, new: Sequence[Pod]) -> list[str]:
    """Return the pods whose loss is counted, with ``new`` ones: all that are left, and the newest others.

    A watch that lags behind, of another replica too, may still tell of some that are gone.
    """
    pods = (*situation.observed.pods, *situation.observed.gone)
    present = {_short(pod) for pod in pods}
    known = [*_known_pods(situation), *map(_short, new)]
    gone = [uid for uid in known if uid not in present][-_MAX_GONE:]
    kept = [uid for uid in known if uid in present or uid in gone]
    return kept[-MAX_COUNTED_PODS:]


def _known_pods(situation: Situation) -> list[str]:
    return (situation.job.status.restarts or Restarts()).counted_pods


def _short(pod: Pod) -> str:
    return names.short_uid(pod.uid)


# Restarts in place: agents end a generation whose trainers hang, and start them in the next one.
#
# The order is an argument of the rendezvous pod, which is replaced for it: no training pod is
# deleted, so the nodes, the snapshots in their memory and the place in a queue are kept.


def is_unanswered(situation: Situation) -> bool:
    """Return whether the generation that hangs was ended before, but its trainers were not restarted."""
    last = situation.in_place_restart
    return last is not None and 0 < _generation(situation) <= last.generation


def next_in_place_restart(situation: Situation) -> InPlaceRestart | None:
    """Return the restart in place of the trainers that hang; None if all pods must be restarted.

    They must if pods are of a revision that is lost, which the service cannot be made from, or if the last
    restart in place did not help: no step was made that had not been made before.
    """
    generation = _generation(situation)
    step = max((rank.step for rank in _ranks(situation)), default=0)
    last, progress = situation.in_place_restart, situation.progress
    has_helped = last is None or step > last.step
    is_lost = any(map(situation.has_other_revision, situation.active))
    if generation == 0 or not has_helped or is_lost:
        return None
    return InPlaceRestart(
        attempt=situation.attempt,
        generation=generation,
        step=step,
        time=stamp(situation.now),
        lastStepTime=progress.last_step_time if progress is not None else None,
    )


def _generation(situation: Situation) -> int:
    """Return the newest generation of the ranks that answer; 0 before the first."""
    return max((rank.generation for rank in _ranks(situation)), default=0)


def _ranks(situation: Situation) -> Sequence[RankProgress]:
    answer = situation.observed.any_progress
    return answer.ranks if answer is not None else ()


# Replacement of single pods in which the program failed: the others keep nodes, memory and group.
#
# Failures of pods that ran side by side, without a step between them, are one end of the program
# and use one restart. All pods restart if the others cannot go on, if the program fails in many of
# them, or if the last replacement did not help.


_ANSWER_SECONDS = 30.0
"""How long to wait for an answer of the rendezvous service, which a new leader has not asked yet."""
_SAME_END_SECONDS = 30.0
"""A peer that fails within this time after a replacement failed with that pod, as trainers are killed within
seconds after one has failed; what is left of them may have made steps since."""
_FEWEST_PODS = 2
"""In which the program fails until all restart; more of a job with more than four nodes."""


def new_failures(situation: Situation) -> tuple[Failure, ...]:
    """Return the failures of the program for which no restart was charged yet."""
    return tuple(f for f in situation.program_failures if not _is_charged(situation, f))


def next_pod_replacement(situation: Situation) -> PodReplacement | None:
    """Return the replacement of the pods in which the program has failed; None if all are recorded."""
    failures, last = situation.program_failures, situation.pod_replacement
    uids = _failed_pods(situation)
    if last is not None and not new_failures(situation):
        is_known = uids == last.pods
        return None if is_known else last.model_copy(update={"pods": uids})
    if not failures:
        return None
    return PodReplacement(
        attempt=situation.attempt,
        time=stamp(situation.now),
        step=_replacement_step(situation),
        replacements=situation.restarts.pod,
        pods=uids,
    )


def needs_all_pods(situation: Situation) -> bool:
    """Return whether all pods must restart after failures of the program."""
    if not situation.program_failures:
        return False
    deadline = answer_deadline(situation)
    return (
        _others_are_useless(situation)
        or _fails_in_many(situation)
        or _did_not_help(situation)
        or (deadline is not None and situation.now >= deadline)
    )


def answer_deadline(situation: Situation) -> float | None:
    """Return the Unix time until which to wait for the rendezvous service; None if there is no need to.

    The agents may be unable to form another generation. A service that is replaced knows of none.
    """
    service, failures = situation.observed.rendezvous, situation.program_failures
    is_up = service is not None and service.running and not service.deleting
    if not failures or not is_up or situation.observed.heard.attempt is not None:
        return None
    return max(f.pod.finished or f.pod.created for f in failures) + _ANSWER_SECONDS


def _has_stepped_since(situation: Situation, last: PodReplacement) -> bool:
    """Return whether a step was made after the replacement ``last``."""
    time = seconds(last.time)
    return time is not None and (situation.last_step_time or 0.0) > time


def _is_charged(situation: Situation, failure: Failure) -> bool:
    """Return whether ``failure`` belongs to the end of the program that the last replacement was for."""
    last, pod = situation.pod_replacement, failure.pod
    if last is None:
        return False
    if pod.uid in last.pods:
        return True
    ended_with = (pod.finished or pod.created) <= (seconds(last.time) or 0.0) + _SAME_END_SECONDS
    is_peer = situation.replacement_number(pod) <= last.replacements
    return is_peer and (ended_with or not _has_stepped_since(situation, last))


def _others_are_useless(situation: Situation) -> bool:
    """Return whether no pods are left for new ones to join, or only those that new ones cannot join."""
    left = [pod for pod in situation.active if not situation.queueing.is_never_admitted(pod)]
    is_useless = not left or release_deadline(situation) is not None
    return is_useless or any(map(situation.has_other_revision, situation.active))


def _fails_in_many(situation: Situation) -> bool:
    """Return whether the program has failed in half of the pods since the last step."""
    half = -(-situation.job.spec.nodes.max // 2)
    return len(_failed_pods(situation)) >= min(MAX_REPLACED_PODS, max(_FEWEST_PODS, half))


def _did_not_help(situation: Situation) -> bool:
    """Return whether the program fails again, and no step was made that had not been made before."""
    last = situation.pod_replacement
    return bool(last and new_failures(situation) and _replacement_step(situation) <= last.step)


def _failed_pods(situation: Situation) -> list[str]:
    """Return the uids of the pods that failed at the newest end of the program."""
    last = situation.pod_replacement
    known: Sequence[str] = last.pods if last is not None and not new_failures(situation) else ()
    uids = [failure.pod.uid[:64] for failure in situation.program_failures]
    return [*known, *(uid for uid in uids if uid not in known)][:MAX_REPLACED_PODS]


def _replacement_step(situation: Situation) -> int:
    progress = situation.progress
    return progress.step if progress is not None else 0
