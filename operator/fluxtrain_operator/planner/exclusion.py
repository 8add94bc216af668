"""Which nodes new pods exclude or avoid for their faults, and when the exclusion is lifted.

A job on a cluster with just as many nodes as it needs must run: if a pod cannot be scheduled on any other
node, it is replaced by one that only avoids them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fluxtrain_operator.planner.disruption import Delete, Reason
from fluxtrain_operator.planner.observed import NodeView, Pod
from fluxtrain_operator.planner.situation import Situation
from fluxtrain_operator.timestamps import seconds, stamp

LIFT_AFTER_SECONDS = 120.0
"""How long a pod may be unschedulable before it may run on nodes that it excludes for their faults."""
LIFTED_SECONDS = 3600.0
"""For how long the job excludes none after that."""


def distrusted_nodes(situation: Situation) -> tuple[str, ...]:
    """Return the host names of the nodes that new pods exclude for their faults.

    None for a job in a queue: Kueue admits all its pods at once, and assigns nodes itself.
    """
    distrust, job = situation.observed.distrust, situation.job
    if not distrust.scores or job.spec.scheduling.queue_name is not None or _is_lifted(situation):
        return ()
    needs_gpus = job.spec.gpus_per_node > 0
    nodes = situation.observed.nodes.values()
    candidates = {n.name for n in nodes if _is_usable(n) and (n.has_gpus or not needs_gpus)}
    return situation.guard.hostnames(distrust.excluded(candidates))


def avoided_nodes(situation: Situation, excluded: Sequence[str]) -> tuple[str, ...]:
    """Return the host names of nodes with silent pods or faults, without those ``excluded`` anyway."""
    distrusted = situation.guard.hostnames(situation.observed.distrust.avoided())
    return tuple(sorted({*situation.guard.avoided_nodes, *distrusted} - {*excluded}))


def unschedulable_pods(situation: Situation) -> Iterator[Pod]:
    """Yield the pods that exclude nodes for their faults and cannot be scheduled on any other."""
    for pod in _waiting(situation):
        if situation.now >= pod.created + LIFT_AFTER_SECONDS:
            yield pod


def lift_times(situation: Situation) -> Iterator[float]:
    """Yield the Unix times at which pods will have been unschedulable for too long."""
    for pod in _waiting(situation):
        yield pod.created + LIFT_AFTER_SECONDS


def exclusion_lifted(situation: Situation, deletions: Sequence[Delete]) -> str | None:
    """Return since when the job excludes no nodes for their faults, after ``deletions``; None if it does."""
    if any(deletion.reason is Reason.UNSCHEDULABLE for deletion in deletions):
        return stamp(situation.now)
    return situation.job.status.exclusion_lifted if _is_lifted(situation) else None


def _waiting(situation: Situation) -> Iterator[Pod]:
    for pod in situation.current:
        is_pending = not (pod.node or pod.ended or pod.deleting)
        if is_pending and pod.excludes_nodes and pod.unschedulable:
            yield pod


def _is_lifted(situation: Situation) -> bool:
    since = seconds(situation.job.status.exclusion_lifted)
    return since is not None and abs(situation.now - since) < LIFTED_SECONDS


def _is_usable(node: NodeView) -> bool:
    """Return whether pods of the job could run on ``node`` if it had no faults."""
    return node.ready and not (node.gone or node.cordoned or node.problem)
