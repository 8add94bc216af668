"""Which faults are attributed to the nodes of a job's pods; docs/operator.md lists them.

Not those that people or the scheduler cause: evictions, preemptions, drains, deleted and cordoned nodes. Nor
those that happen on several nodes at a time, of which the program is the likelier cause; the preflight,
however, compares each of them with the median.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from fluxtrain.contract.resource.status import (
    MAX_NODE_FAULTS,
    MAX_RETRIES,
    NodeFault,
    Restarts,
    Retry,
)
from fluxtrain_operator.base import names
from fluxtrain_operator.base.names import seconds, stamp
from fluxtrain_operator.planner.guard import (
    HARDWARE_CODES,
    NODE_FAULTS,
    SHORT_LIVED_SECONDS,
    START_ERROR,
    UNFIT_NODE,
    Delete,
    Failure,
    Reason,
    retry_time,
)
from fluxtrain_operator.planner.observed import Pod, nodes_for
from fluxtrain_operator.planner.situation import Decision, Situation
from fluxtrain_operator.planner.watchdog import first_to_stop

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
    attributed = [
        *_lost(situation, deletions),
        *_not_killed(situation),
        *_ended(situation),
        *_stalled(situation, decision),
    ]
    new = [fault for fault in attributed if not any(_is_same(fault, other) for other in known)]
    kept = _newest([*known, *new])
    return [fault for fault in new if fault in kept]


def _lost(situation: Situation, deletions: Sequence[Delete]) -> Iterator[NodeFault]:
    """Yield the faults for which pods are deleted now."""
    faults = {d.uid: d.reason for d in deletions if d.reason in NODE_FAULTS}
    store = situation.observed.rendezvous
    for pod in [*situation.current, *([store] if store is not None else [])]:
        reason, node = faults.get(pod.uid), situation.observed.node_of(pod)
        if reason is None or pod.deleting or node.gone or node.cordoned:
            continue
        is_silent = reason is Reason.NODE_LOST and node.ready and situation.guard.is_silent(pod)
        yield _fault(pod, "AgentLost" if is_silent else str(reason), situation.now)


def _not_killed(situation: Situation) -> Iterator[NodeFault]:
    """Yield the pods that a kubelet, which reports to be well, does not end in time."""
    for pod in situation.current:
        timeout, node = situation.deletion_timeout(pod), situation.observed.node_of(pod)
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
        node = situation.observed.node_of(pod)
        is_its_own = len(nodes[reason]) == 1 or reason == UNFIT_NODE
        if is_its_own and not (node.gone or node.cordoned):
            yield _fault(pod, reason, pod.finished or pod.created)


def exit_reason(failure: Failure) -> str:
    """Return why the end of a pod may be a fault of its node; empty if it points elsewhere."""
    pod = failure.pod
    if pod.disruption or pod.init_container:
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


# Delays before pods that the infrastructure lets fail are replaced: per pod and reason, in the
# status.
#
# The first failure delays by ten seconds, each one that follows with the same reason by twice as
# long, up to five minutes. A pod that has run for a minute begins anew. None of this costs a
# restart.


_EXPIRY_SECONDS = 3600.0
"""A failure that long after the last one does not follow it."""
_CLOCK_SECONDS = 5.0
"""By how much the API server's clock, which pods are created by, may be behind."""
_REPORTED_FROM, _MAX_COUNT = 2, 9999


def replacement_time(situation: Situation, failure: Failure) -> float:
    """Return the Unix time from which the pod of ``failure`` may be replaced.

    Each reason has its own delays, and those of the infrastructure each pod.
    """
    if failure.infrastructure:
        return retry_time(failure, num_failures(situation, failure))
    restarts = situation.job.status.restarts or Restarts()
    return retry_time(failure, restarts.causes.get(failure.reason, 0))


def num_failures(situation: Situation, failure: Failure) -> int:
    """Return how often the pods before that of ``failure`` failed for the same reason, in a row."""
    index = _index(situation, failure.pod)
    retry = next((retry for retry in _active(situation) if retry.index == index), None)
    if retry is None or retry.reason != failure.reason:
        return 0
    return max(0, retry.count - (retry.pod == failure.pod.uid))


def next_retries(
    situation: Situation, restarts_pods: bool, deletions: Sequence[Delete]
) -> list[Retry]:
    """Return the retries after ``deletions``; each failed pod counts when its deletion is requested.

    ``restarts_pods`` is whether pods that are deleted are replaced.
    """
    retries = {retry.index: retry for retry in _active(situation)}
    counted: set[int] = set()
    deleted = {deletion.uid for deletion in deletions} if restarts_pods else set()
    for failure in situation.failures:
        index = _index(situation, failure.pod)
        if not failure.infrastructure or failure.pod.uid not in deleted or index in counted:
            continue
        counted.add(index)
        retries.pop(index, None)
        if failure.is_short_lived:
            retries[index] = Retry(
                index=index,
                reason=failure.reason,
                count=min(_MAX_COUNT, num_failures(situation, failure) + 1),
                time=stamp(situation.now),
                pod=failure.pod.uid[:64],
            )
    newest = sorted(retries.values(), key=lambda retry: (retry.time, retry.index))[-MAX_RETRIES:]
    return sorted(newest, key=lambda retry: retry.index)


def repeated_failure(situation: Situation) -> tuple[str, str] | None:
    """Return reason and message of the pods that failed most often in a row; None if none did twice."""
    repeated = [*_failing(situation), *_failed_before(situation)]
    count, reason, message = max(repeated, default=(0, "", ""))
    return (reason, message) if count >= _REPORTED_FROM else None


def recovery_times(situation: Situation) -> Iterator[float]:
    """Yield the Unix times at which running pods will have run long enough to begin anew."""
    for retry in _active(situation):
        for pod in _successors(situation, retry):
            if pod.started is not None:
                yield pod.started + SHORT_LIVED_SECONDS


def _failing(situation: Situation) -> Iterator[tuple[int, str, str]]:
    for failure in situation.failures:
        if failure.infrastructure and failure.is_short_lived:
            before = num_failures(situation, failure)
            time = stamp(retry_time(failure, before))
            text = f"{failure.message}; {before + 1} times in a row, replaced at {time}"
            yield before + 1, failure.reason, text


def _failed_before(situation: Situation) -> Iterator[tuple[int, str, str]]:
    present = {_index(situation, failure.pod) for failure in situation.failures}
    job = situation.job
    for retry in _active(situation):
        if retry.index not in present:
            is_queued = situation.queueing.has_groups
            pod = "pods" if is_queued else names.pod(job.name, retry.index)
            text = f"{pod} failed {retry.count} times in a row shortly after the start"
            yield retry.count, retry.reason, text


def _active(situation: Situation) -> list[Retry]:
    """Return the retries of pods that have not run long enough since."""
    return [r for r in situation.job.status.retries if not _is_over(situation, r)]


def _is_over(situation: Situation, retry: Retry) -> bool:
    time = seconds(retry.time)
    if time is None or abs(situation.now - time) > _EXPIRY_SECONDS:
        return True
    began = situation.now - SHORT_LIVED_SECONDS
    pods = _successors(situation, retry)
    return any(pod.started is not None and pod.started <= began for pod in pods)


def _successors(situation: Situation, retry: Retry) -> Iterator[Pod]:
    """Yield the running pods that were created after the last failure."""
    since = (seconds(retry.time) or 0.0) - _CLOCK_SECONDS
    for pod in situation.current:
        is_later = pod.created >= since and pod.uid != retry.pod
        if pod.running and is_later and _index(situation, pod) == retry.index:
            yield pod


def _index(situation: Situation, pod: Pod) -> int:
    """Return the index under which failures of ``pod`` count: Kueue's groups replace under another one."""
    return 0 if situation.queueing.has_groups else pod.index


# Which nodes new pods exclude or avoid for their faults, and when the exclusion is lifted.
#
# A job on a cluster with just as many nodes as it needs must run: if a pod cannot be scheduled on
# any other node, it is replaced by one that only avoids them.


LIFT_AFTER_SECONDS = 120.0
"""How long a pod may be unschedulable before it may run on nodes that it excludes for their faults."""
LIFTED_SECONDS = 3600.0
"""For how long the job excludes none after that."""


def distrusted_nodes(situation: Situation) -> tuple[str, ...]:
    """Return the host names of the nodes that new pods exclude for their faults.

    None for a job in a queue: Kueue admits all its pods at once, and assigns nodes itself.
    """
    distrust = situation.observed.distrust
    if not distrust.scores or situation.queueing.has_groups or _is_lifted(situation):
        return ()
    candidates = {
        node.name
        for node in nodes_for(situation.observed.nodes.values(), situation.job.spec)
        if node.ready and not (node.gone or node.cordoned or node.problem)
    }
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
