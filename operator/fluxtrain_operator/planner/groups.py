"""Kueue's pod group of a job: which pods hold its places, when it has ended, and when a restart keeps it.

A group has a fixed number of places. A place is free once its pod has failed, and Kueue admits a replacement
at once, within the quota. The group ends with its last pod; another one queues behind others. So a restart of
all pods keeps one of them until the first new one is there. For Kueue the pod of a lost node runs: its place
is free only once the node is back or removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from fluxtrain.contract.process import write_places
from fluxtrain_operator.base import names
from fluxtrain_operator.planner.guard import Reason
from fluxtrain_operator.planner.observed import Pod, nodes_for
from fluxtrain_operator.planner.situation import Situation
from fluxtrain_operator.resources.pods import receives_topology

RELEASE_SECONDS = 300.0
"""How long after the grace period of a lost pod its group waits for the place: for a node to restart, or to
be removed."""
_FEWEST_PLACES = 2
"""Of a group that a restart keeps: one for the pod that is kept, one for the first new pod."""


def num_places_taken(situation: Situation) -> int:
    """Return how many places of the group no new pod can have now, apart from those of active pods."""
    return len(situation.lost_members) + len(held_by_previous(situation))


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
    held = held_by_previous(situation)
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


def held_by_previous(situation: Situation) -> list[Pod]:
    """Return the pods of earlier attempts that count as members of the present group."""
    if situation.group == situation.attempt:
        return []
    queueing = situation.queueing
    pods = (pod for pod in situation.previous if pod.attempt >= situation.group)
    held = [p for p in pods if p.phase != "Failed" and (p.node or not p.deleting)]
    return sorted(filter(queueing.is_member, held), key=lambda pod: pod.index)


def _blocked(situation: Situation) -> list[Pod]:
    """Return the members whose places no pod can have, for as long as nodes are lost."""
    before, usable = held_by_previous(situation), members_before(situation)
    return [*situation.lost_members, *(pod for pod in before if pod not in usable)]


def _is_admittable(situation: Situation, pod: Pod) -> bool:
    return not situation.queueing.is_never_admitted(pod)


# Places of nodes, such as racks, by which the rendezvous service orders ranks.
#
# The rendezvous pod gets the order of all nodes that the job could run on, so that it need not
# be replaced when a pod moves to another node.


def places(situation: Situation) -> str:
    """Return the argument for a new rendezvous pod; empty if ranks are not ordered by place."""
    label, nodes = situation.job.spec.scheduling.rank_order_label, situation.observed.nodes
    if label is None:
        return ""
    known = (name for name in dict.fromkeys(_candidates(situation)) if name in nodes)
    return write_places({name: nodes[name].labels.get(label, "") for name in known})


def misses_places(situation: Situation, rendezvous: Pod) -> bool:
    """Return whether the job is about to start on nodes that are newer than its rendezvous pod.

    A cluster may have been enlarged for it. Once all its pods have nodes, one more rendezvous pod suffices;
    once agents have met, ranks keep their order until they meet again.
    """
    job, pods = situation.job, situation.active
    label = job.spec.scheduling.rank_order_label
    if label is None or situation.observed.heard.generation != 0:
        return False
    if len(pods) < job.spec.nodes.max or not receives_topology(situation.revision):
        return False
    nodes = [situation.observed.nodes.get(pod.node) for pod in pods]
    return all(nodes) and any(
        node.created > rendezvous.created and node.labels.get(label) for node in nodes if node
    )


def _candidates(situation: Situation) -> Iterator[str]:
    """Yield the nodes of the job's pods, then the others that it could run on: the list may be cut."""
    yield from (pod.node for pod in situation.current)
    nodes = nodes_for(situation.observed.nodes.values(), situation.job.spec)
    yield from sorted(node.name for node in nodes if not node.gone)


COMPLETE, FAILED = "Complete", "Failed"
_REMEDY = "it, or take it out of spec.lifecycle.startAfter"


def completed_predecessors(situation: Situation) -> list[str]:
    """Return the jobs of ``startAfter`` that are complete, or were when they were seen last.

    With ``startWhen: Ended`` failed ones count as well. One that exists counts by its present phase: if it
    was created again, it must complete again. Once the job has begun they stay as they are.
    """
    before, phases = situation.job.status, situation.observed.predecessors
    known = set(before.completed_predecessors)
    if before.attempt > 0:
        return before.completed_predecessors
    lifecycle = situation.job.spec.lifecycle
    enough = (COMPLETE, FAILED) if lifecycle.start_when == "Ended" else (COMPLETE,)
    start_after = dict.fromkeys(lifecycle.start_after)
    return [n for n in start_after if phases.get(n, COMPLETE if n in known else "") in enough]


def awaited_predecessors(situation: Situation) -> list[str]:
    """Return the jobs of ``startAfter`` that the job still waits for."""
    completed = completed_predecessors(situation)
    start_after = dict.fromkeys(situation.job.spec.lifecycle.start_after)
    return [n for n in start_after if n not in completed]


def predecessor_state(name: str, phase: str | None) -> str:
    """Return a clause about the awaited job ``name``, whose ``phase`` is None if it does not exist."""
    if phase is None:
        return f"{name} does not exist; create {_REMEDY}"
    return f"{name} is {phase or 'new'}" + (f"; recreate {_REMEDY}" if phase == FAILED else "")


KEPT_BY_FINALIZERS = "KeptByFinalizers"


def kept_problem(situation: Situation) -> tuple[str, str] | None:
    """Return reason and message about the first of those pods; None without one."""
    observed = situation.observed
    for pod in (*observed.kept_rendezvous, *observed.pods):
        if pod.kept_by:
            text = "another pod takes its place, under another name"
            return (
                KEPT_BY_FINALIZERS,
                f"{pod.name}: deleted, kept by {', '.join(pod.kept_by)}: {text}",
            )
    return None


def rendezvous_name(situation: Situation) -> str:
    """Return the name of the next rendezvous pod: the first that no kept one has."""
    taken = {pod.name for pod in situation.observed.kept_rendezvous}
    candidates = (names.rendezvous(situation.job.name, number) for number in count(1))
    return next(name for name in candidates if name not in taken)


LABELS_CHANGED = "LabelsChanged"


def label_problem(situation: Situation) -> tuple[str, str] | None:
    """Return reason and message about the first training pod whose labels were changed; None without one."""
    for pod in situation.active:
        if pod.changed_labels:
            keys = ", ".join(pod.changed_labels)
            effect = "Services, network policies and other selectors may not find it"
            return LABELS_CHANGED, f"{pod.name}: somebody has changed {keys}: {effect}"
    return None


def found_pods(situation: Situation, *reasons: Reason) -> Iterator[Pod]:
    """Yield the pods in the way for one of ``reasons``: its own LABEL_REMOVED ones, then RESTORED ones."""
    for reason in reasons:
        for failure in situation.observed.create_failures:
            if failure.uid and failure.reason == reason:
                yield Pod(failure.name, failure.uid)
