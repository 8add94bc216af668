"""Which faults are attributed to the nodes of a job's pods; docs/operator.md has the same table.

Not those that people or the scheduler cause: evictions, preemptions, drains, deleted and cordoned nodes. Nor
those that happen on several nodes at a time, of which the program is the likelier cause; the preflight,
however, compares each of them with the median.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from fluxtrain.contract.resource.status import MAX_NODE_FAULTS, NodeFault
from fluxtrain_operator.planner.decision import Decision
from fluxtrain_operator.planner.disruption import NODE_FAULTS, Delete, Reason
from fluxtrain_operator.planner.failures import (
    HARDWARE_CODES,
    START_ERROR,
    UNFIT_NODE,
    Failure,
)
from fluxtrain_operator.planner.observed import NodeView, Pod
from fluxtrain_operator.planner.situation import Situation
from fluxtrain_operator.planner.watchdog import first_to_stop
from fluxtrain_operator.timestamps import seconds, stamp

HARDWARE_ERROR = "HardwareError"
_HARDWARE_MESSAGE = re.compile(
    r"was ended by SIG(?:ILL|BUS|SEGV)\b|uncorrectable ECC|ECCNotCorrectable|hardware error", re.I
)
"""In the termination message: the agent names the signal, HIP and CUDA the error of the device."""
_OF_THE_NODE = ("Killed", "UnexpectedAdmissionError", "PodLost", START_ERROR, UNFIT_NODE)
"""Failures of the infrastructure that may be the node's: they count less, see `distrust`."""
_KILLED_CODE = 137
_SAME_STALL_SECONDS = 600.0
"""A stall of the same pod after a longer time is another one."""


def next_faults(situation: Situation, new: Sequence[NodeFault]) -> list[NodeFault]:
    """Return the faults of the status and ``new`` ones: the newest MAX_NODE_FAULTS, oldest first."""
    return _newest([*situation.job.status.node_faults, *new])


def new_faults(
    situation: Situation, decision: Decision, deletions: Sequence[Delete]
) -> list[NodeFault]:
    """Return the faults that the status does not have yet: one for each pod."""
    known = situation.job.status.node_faults
    found = [
        *_lost(situation, deletions),
        *_not_killed(situation),
        *_ended(situation),
        *_stalled(situation, decision),
    ]
    new = [fault for fault in found if not any(_is_same(fault, other) for other in known)]
    kept = _newest([*known, *new])
    return [fault for fault in new if fault in kept]


def _lost(situation: Situation, deletions: Sequence[Delete]) -> Iterator[NodeFault]:
    """Yield the faults for which pods are deleted now."""
    faults = {d.uid: d.reason for d in deletions if d.reason in NODE_FAULTS}
    store = situation.observed.rendezvous
    for pod in [*situation.current, *([store] if store is not None else [])]:
        reason, node = faults.get(pod.uid), _node(situation, pod)
        if reason is None or pod.deleting or node.gone or node.cordoned:
            continue
        is_silent = reason is Reason.NODE_LOST and node.ready and situation.guard.is_silent(pod)
        yield _fault(pod, "AgentLost" if is_silent else str(reason), situation.now)


def _not_killed(situation: Situation) -> Iterator[NodeFault]:
    """Yield the pods that a kubelet, which reports to be well, does not end in time."""
    for pod in situation.current:
        timeout, node = situation.deletion_timeout(pod), _node(situation, pod)
        is_due = timeout is not None and timeout <= situation.now
        if is_due and node.ready and not (node.gone or node.cordoned or pod.ended or pod.forced):
            yield _fault(pod, "KubeletUnresponsive", timeout or 0.0)


def _ended(situation: Situation) -> Iterator[NodeFault]:
    """Yield the pods whose end points at their node, unless others ended like that on other nodes."""
    ended = [
        (failure.pod, reason)
        for failure in situation.failures
        if failure.pod.node and (reason := exit_reason(failure))
    ]
    nodes = defaultdict[str, set[str]](set)
    for pod, reason in ended:
        nodes[reason].add(pod.node)
    for pod, reason in ended:
        node = _node(situation, pod)
        is_its_own = len(nodes[reason]) == 1 or reason == UNFIT_NODE
        if is_its_own and not (node.gone or node.cordoned):
            yield _fault(pod, reason, pod.finished or pod.created)


def exit_reason(failure: Failure) -> str:
    """Return why the end of a pod may be a fault of its node; empty if it points elsewhere."""
    pod = failure.pod
    if pod.disrupted or pod.init_container:
        return ""
    if pod.exit_code in HARDWARE_CODES or _HARDWARE_MESSAGE.search(pod.message):
        return HARDWARE_ERROR
    is_signal_of_others = failure.reason == "Killed" and pod.exit_code != _KILLED_CODE
    if not failure.infrastructure or failure.reason not in _OF_THE_NODE or is_signal_of_others:
        return ""
    return failure.reason


def _stalled(situation: Situation, decision: Decision) -> Iterator[NodeFault]:
    """Yield the stall that the job is restarted for, if one rank stopped before all others."""
    if decision.reason != Reason.NO_PROGRESS:
        return
    pod = first_to_stop(situation)
    if pod is not None:
        yield _fault(pod, str(Reason.NO_PROGRESS), situation.now)


def _is_same(fault: NodeFault, other: NodeFault) -> bool:
    if fault.pod != other.pod:
        return False
    distance = abs((seconds(fault.time) or 0.0) - (seconds(other.time) or 0.0))
    return fault.reason != Reason.NO_PROGRESS or distance < _SAME_STALL_SECONDS


def _newest(faults: Sequence[NodeFault]) -> list[NodeFault]:
    return sorted(faults, key=lambda fault: seconds(fault.time) or 0.0)[-MAX_NODE_FAULTS:]


def _fault(pod: Pod, reason: str, time: float) -> NodeFault:
    return NodeFault(node=pod.node, reason=reason, time=stamp(time), pod=pod.uid[:64])


def _node(situation: Situation, pod: Pod) -> NodeView:
    return situation.observed.nodes.get(pod.node) or NodeView(pod.node)
