"""Faults of nodes as the condition Healthy reports them."""

from __future__ import annotations

from fluxtrain_operator.planner.disruption import Reason
from fluxtrain_operator.planner.situation import Situation
from fluxtrain_operator.planner.watchdog import has_stalled


def node_problem(situation: Situation) -> tuple[str, str] | None:
    """Return reason and message of the most severe fault of a node; None if there is none."""
    guard = situation.guard
    is_concerned = guard.on_not_ready_nodes or has_stalled(situation)
    if is_concerned and guard.control_plane_outage:
        text = "the control plane does not hear of them; nothing is replaced"
        return "NodesUnknown", f"{guard.control_plane_outage}: {text}"
    if guard.ignores_unhealthy_gpus:
        text = f"{guard.gpu_exporter_fault}: nothing is replaced"
        return "UnhealthyGPUs", text
    if guard.ignores_unhealthy_nodes:
        text = f"{guard.node_detector_fault}: nothing is replaced"
        return "UnhealthyNodes", text
    if guard.postponed:
        text = "stay for now: too many are replaced at a time, see --disruption-percent"
        return "DisruptionLimited", f"{len(guard.postponed)} pods on faulty nodes {text}"
    for pod in situation.current:
        if situation.unreachable(pod):
            return "NodeLost", situation.loss_of(pod)
        if (reason := guard.unhealthy_reason(pod)) is not None:
            node = situation.observed.nodes[pod.node]
            fault = node.problem if reason is Reason.UNHEALTHY_NODE else node.unhealthy
            return str(reason), f"{pod.name}: node {pod.node}: {fault}"
    for pod in guard.on_not_ready_nodes[:1]:
        text = "is not ready; it is kept while training goes on with it"
        return "NodeNotReady", f"{pod.name}: node {pod.node} {text}"
    return None
