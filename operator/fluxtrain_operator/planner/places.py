"""Places of nodes, such as racks, by which the rendezvous service orders ranks.

The rendezvous pod is told the order of all nodes that the job could run on, so that it need not be replaced
when a pod moves to another node.
"""

from __future__ import annotations

from collections.abc import Iterator

from fluxtrain.contract.places import write_places
from fluxtrain_operator.planner.observed import Pod
from fluxtrain_operator.planner.situation import Situation
from fluxtrain_operator.resources.slot import is_told_places


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
    if len(pods) < job.spec.nodes.max or not is_told_places(situation.revision):
        return False
    nodes = [situation.observed.nodes.get(pod.node) for pod in pods]
    return all(nodes) and any(
        node.created > rendezvous.created and node.labels.get(label) for node in nodes if node
    )


def _candidates(situation: Situation) -> Iterator[str]:
    """Yield the nodes of the job's pods, then the others that it could run on: the list may be cut."""
    yield from (pod.node for pod in situation.current)
    nodes, needs_gpus = situation.observed.nodes, situation.job.spec.gpus_per_node > 0
    yield from (
        name
        for name, node in sorted(nodes.items())
        if not node.gone and (node.has_gpus or not needs_gpus)
    )
