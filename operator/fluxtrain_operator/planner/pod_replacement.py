"""Replacement of single pods in which the program failed: the others keep their nodes, memory and group.

Failures of pods that ran side by side, without a step between them, are one end of the program and use one
restart. All pods restart if the others cannot go on, if the program fails in many of them, or if the last
replacement did not help.
"""

from __future__ import annotations

from collections.abc import Sequence

from fluxtrain.contract.resource.status import MAX_REPLACED_PODS, PodReplacement
from fluxtrain_operator.planner.failures import Failure
from fluxtrain_operator.planner.pod_group import release_deadline
from fluxtrain_operator.planner.situation import Situation
from fluxtrain_operator.timestamps import seconds, stamp

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
        step=_step(situation),
        replacements=situation.restarts.pod,
        pods=uids,
    )


def needs_all_pods(situation: Situation) -> bool:
    """Return whether all pods must restart after failures of the program."""
    if not situation.program_failures:
        return False
    deadline, heard = answer_deadline(situation), situation.observed.heard
    return (
        _others_are_useless(situation)
        or _fails_in_many(situation)
        or _did_not_help(situation)
        or is_closed(situation)
        or (heard.attempt is not None and heard.closed is None)  # a service of an older image
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


def is_closed(situation: Situation) -> bool:
    """Return whether an agent has ended the attempt for all, as those of older images do when they fail."""
    heard = situation.observed.heard
    return heard.attempt == situation.attempt and heard.closed is True


def has_stepped_since(situation: Situation, last: PodReplacement) -> bool:
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
    is_peer = pod.replacement <= last.replacements
    return is_peer and (ended_with or not has_stepped_since(situation, last))


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
    return last is not None and bool(new_failures(situation)) and _step(situation) <= last.step


def _failed_pods(situation: Situation) -> list[str]:
    """Return the uids of the pods that failed at the newest end of the program."""
    last = situation.pod_replacement
    known: Sequence[str] = last.pods if last is not None and not new_failures(situation) else ()
    uids = [failure.pod.uid[:64] for failure in situation.program_failures]
    return [*known, *(uid for uid in uids if uid not in known)][:MAX_REPLACED_PODS]


def _step(situation: Situation) -> int:
    progress = situation.progress
    return progress.step if progress is not None else 0
