"""Kueue's pod group of a job: which pods hold its places, when it has ended, and when a restart keeps it.

A group has a fixed number of places. A place is free once its pod has failed, and Kueue admits a replacement
at once, within the quota. The group ends with its last pod; another one queues behind others. So a restart of
all pods keeps one of them until the first new one is there. For Kueue the pod of a lost node runs: its place
is free only once the node is back or removed.
"""

from __future__ import annotations

from fluxtrain_operator.planner.observed import Pod
from fluxtrain_operator.planner.situation import Situation

RELEASE_SECONDS = 300.0
"""How long after the grace period of a lost pod its group waits for the place: for a node to restart, or to
be removed."""
_FEWEST_PLACES = 2
"""Of a group that a restart keeps: one for the pod that is kept, one for the first new pod."""


def num_places_taken(situation: Situation) -> int:
    """Return how many places of the group no new pod can have now, beside those of active pods."""
    return len(situation.lost_members) + len(_held_by_previous(situation))


def previous_indices(situation: Situation) -> set[int]:
    """Return the indices of the pods of earlier attempts that hold places of the group."""
    return {pod.index for pod in _held_by_previous(situation)}


def has_ended(situation: Situation) -> bool:
    """Return whether the job needs another group: Kueue has ended this one, or too few places are usable.

    Places of lost pods are waited for, as long as others of the group are left, also of an attempt before.
    """
    if not situation.queueing.has_groups or not situation.current:
        return False
    if not any(_is_admittable(situation, pod) for pod in situation.active):
        return not members_before(situation)
    deadline = release_deadline(situation)
    return deadline is not None and situation.now >= deadline


def release_deadline(situation: Situation) -> float | None:
    """Return the Unix time until which the group waits for places of lost pods; None if it needs none.

    It waits for no pod that has succeeded: that one keeps its place.
    """
    nodes, lost = situation.job.spec.nodes, _blocked(situation)
    if not situation.queueing.has_groups or nodes.max - len(lost) >= nodes.min:
        return None
    released = [pod for pod in lost if not pod.succeeded]
    if nodes.max - (len(lost) - len(released)) < nodes.min:
        return situation.now
    times = (
        situation.now if p.deletion_deadline is None else p.deletion_deadline for p in released
    )
    return max(times) + RELEASE_SECONDS


def survives_restart(situation: Situation) -> bool:
    """Return whether new pods of all places can join the group, one after the other."""
    nodes, members = situation.job.spec.nodes, [*situation.active, *situation.lost_members]
    places = nodes.max - len(_blocked(situation))
    return (
        situation.queueing.has_groups
        and any(_is_admittable(situation, pod) for pod in situation.active)
        and places >= max(_FEWEST_PLACES, nodes.min)
        and not any(is_of_other_spec(situation, pod) for pod in members)
    )


def is_of_other_spec(situation: Situation, pod: Pod) -> bool:
    """Return whether a pod of the present spec cannot join the group of ``pod``."""
    fits = situation.queueing.fits(pod.nodes[1], situation.job.spec.nodes.max)
    return not fits or not situation.matches_spec(pod)


def members_before(situation: Situation) -> list[Pod]:
    """Return the pods of earlier attempts that hold places of the group and may be replaced."""
    held = _held_by_previous(situation)
    return [pod for pod in held if not (pod.succeeded or situation.unreachable(pod))]


def kept_pod(situation: Situation) -> Pod | None:
    """Return the pod of an earlier attempt that stays until a new one is in the group; None if none must.

    It does not stay if no place will be free before its own.
    """
    if any(_is_admittable(situation, pod) for pod in situation.active if pod.finalizers):
        return None
    left = members_before(situation)
    kept = next((pod for pod in left if not pod.deleting and not pod.ended), None)
    num_free = situation.job.spec.nodes.max - len(situation.active) - num_places_taken(situation)
    return kept if num_free > 0 or len(left) > 1 else None


def _held_by_previous(situation: Situation) -> list[Pod]:
    """Return the pods of earlier attempts that count as members of the present group."""
    if situation.group == situation.attempt:
        return []
    queueing = situation.queueing
    pods = (pod for pod in situation.previous if pod.attempt >= situation.group)
    held = [p for p in pods if p.phase != "Failed" and (p.node or not p.deleting)]
    return sorted(filter(queueing.is_member, held), key=lambda pod: pod.index)


def _blocked(situation: Situation) -> list[Pod]:
    """Return the members whose places no pod can have, for as long as nodes are lost."""
    before, usable = _held_by_previous(situation), members_before(situation)
    return [*situation.lost_members, *(pod for pod in before if pod not in usable)]


def _is_admittable(situation: Situation, pod: Pod) -> bool:
    return not situation.queueing.is_never_admitted(pod)
