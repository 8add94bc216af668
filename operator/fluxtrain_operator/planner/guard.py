"""The disruption guard: which faults of nodes are believed, and how many pods may be replaced for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from fluxtrain.errors import (
    EXIT_DIVERGED,
    EXIT_ERROR,
    EXIT_STOPPED,
    EXIT_STORAGE,
    EXIT_UNFIT,
    EXIT_USAGE,
)
from fluxtrain_operator.base.job import Job
from fluxtrain_operator.base.names import earliest, seconds
from fluxtrain_operator.planner.observed import NodeView, Observed, Pod, nodes_for

GRACE_SECONDS = 20.0
"""How long a node may be not ready before it counts as lost, if its trainers do not report progress:
heartbeats reach a busy control plane seconds late. Also how long a GPU must be unhealthy: a broken exporter
reports the nodes one after the other."""
_RECENT_PROGRESS_SECONDS = 60.0
"""Progress that is not older proves that the nodes of the present world run."""
_OUTAGE_SECONDS = 3600.0
"""A node that has been not ready for longer does not count towards an outage."""


def control_plane_outage(nodes: Iterable[NodeView], now: float) -> str:
    """Return why nodes that are not ready do not count as lost; empty if they do.

    If more nodes became not ready lately than are ready, the control plane has lost the connection.
    """
    existing = [node for node in nodes if not node.gone]
    num_ready = sum(node.ready for node in existing)
    num_lately = sum(not node.ready and now - node.since < _OUTAGE_SECONDS for node in existing)
    if not existing or (num_ready and num_lately <= num_ready):
        return ""
    return f"{len(existing) - num_ready} of {len(existing)} nodes are not ready"


@dataclass(frozen=True)
class Guard:
    """One job's pods and the nodes: decides which pods count as lost, so that they are replaced."""

    job: Job
    observed: Observed
    now: float
    pods: tuple[Pod, ...]
    """Pods of the present attempt."""

    def refusal(self, reason: Reason, pod: Pod | None = None) -> str:
        """Return why no pod, or not ``pod``, is deleted for ``reason`` at the moment; empty if it may be.

        Pods of deleted nodes may be: such a node is known to be gone.
        """
        if reason not in FAULTS or (pod is not None and self.observed.node_of(pod).gone):
            return ""
        return self.control_plane_outage

    @cached_property
    def on_not_ready_nodes(self) -> tuple[Pod, ...]:
        return tuple(pod for pod in self._running if not self.observed.node_of(pod).ready)

    @cached_property
    def control_plane_outage(self) -> str:
        """Return why nodes that are not ready do not count as lost; empty if they do."""
        return control_plane_outage(self.observed.nodes.values(), self.now)

    @cached_property
    def gpu_exporter_fault(self) -> str:
        """Return why GPUs that are reported as unhealthy count as healthy; empty if they do not."""
        return self._wrong_exporter or self._no_healthy_node

    @cached_property
    def node_detector_fault(self) -> str:
        """Return why nodes that are marked as unhealthy count as healthy; empty if they do not."""
        return self._wrong_detector or self._no_healthy_node

    @cached_property
    def _wrong_exporter(self) -> str:
        """Return that most nodes report unhealthy GPUs: no node would be left to move to; else empty."""
        nodes = [n for n in self.observed.nodes.values() if n.has_gpus or n.unhealthy]
        num_unhealthy = sum(bool(node.unhealthy) for node in nodes)
        is_wrong = num_unhealthy > len(nodes) - num_unhealthy
        text = f"{num_unhealthy} of {len(nodes)} nodes with GPUs report unhealthy ones"
        return text if is_wrong else ""

    @cached_property
    def _wrong_detector(self) -> str:
        """Return that most nodes are marked: no node would be left to move to; else empty."""
        nodes = [node for node in self.observed.nodes.values() if not node.gone]
        num_marked = sum(bool(node.problem) for node in nodes)
        is_wrong = num_marked > len(nodes) - num_marked
        return f"{num_marked} of {len(nodes)} nodes are marked as unhealthy" if is_wrong else ""

    @cached_property
    def _no_healthy_node(self) -> str:
        """Return that no node is left to move to; empty if there is one.

        A pod would only change from one unhealthy node to another, again and again.
        """
        for node in nodes_for(self.observed.nodes.values(), self.job.spec):
            if node.ready and not node.cordoned and not self._credible_marks(node):
                return ""
        return "no other node is ready and healthy"

    @property
    def ignores_unhealthy_nodes(self) -> bool:
        """Return whether pods of the job stay on nodes that are marked as unhealthy."""
        marked = any(self.observed.node_of(pod).problem for pod in self._running)
        return marked and bool(self.node_detector_fault)

    @property
    def ignores_unhealthy_gpus(self) -> bool:
        """Return whether pods of the job stay on GPUs that are reported as unhealthy."""
        reported = any(self.observed.node_of(pod).unhealthy for pod in self._running)
        return reported and self.job.spec.gpus_per_node > 0 and bool(self.gpu_exporter_fault)

    @property
    def recheck_time(self) -> float | None:
        """Return the Unix time at which to check again whether nodes are lost; None if all are ready.

        Changes of nodes without pods of the job do not requeue the job.
        """
        outage = self.on_not_ready_nodes and self.control_plane_outage
        ignores = self.ignores_unhealthy_gpus or self.ignores_unhealthy_nodes
        if ignores or outage or self.postponed:
            return self.now + GRACE_SECONDS
        grace = [
            self.observed.node_of(pod).since + GRACE_SECONDS for pod in self.on_not_ready_nodes
        ]
        unhealthy = [
            since + GRACE_SECONDS
            for pod in self._running
            for since in self._marks(pod.node).values()
        ]
        latest = self._latest_progress_time
        outdated = None if latest is None else latest + _RECENT_PROGRESS_SECONDS
        return earliest(
            time
            for time in [*grace, *unhealthy, outdated if grace else None]
            if time and time > self.now
        )

    @cached_property
    def excluded_nodes(self) -> tuple[str, ...]:
        """Return the host names of the nodes that, or whose GPUs, are marked as unhealthy."""
        return self.hostnames(name for name in self.observed.nodes if self._marks(name))

    @cached_property
    def avoided_nodes(self) -> tuple[str, ...]:
        """Return the host names of nodes with silent pods: Kubernetes may report them as lost only later."""
        pods = [*self.observed.pods, self.observed.rendezvous]
        return self.hostnames({pod.node for pod in pods if pod and self.is_silent(pod)})

    def hostnames(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """Return the host names, by which pods select nodes, of ``nodes``, sorted."""
        views = (self.observed.nodes.get(name) or NodeView(name) for name in nodes)
        return tuple(sorted({view.hostname or view.name for view in views}))

    def is_silent(self, pod: Pod) -> bool:
        """Return whether the agent in ``pod`` is lost, or the service; not if more nodes are than are alive.

        Then the service, or the control plane, has lost the connection.
        """
        if not pod.running or pod.uid not in self.observed.heard.silent:
            return False
        is_believed = pod is self.observed.rendezvous or self._most_nodes_are_heard
        return is_believed and not self.refusal(Reason.NODE_LOST)

    @cached_property
    def _most_nodes_are_heard(self) -> bool:
        alive, silent = (
            {pod.node for pod in self.observed.pods if pod.uid in uids}
            for uids in (self.observed.heard.alive, self.observed.heard.silent)
        )
        return len(silent - alive) <= len(alive)

    @cached_property
    def postponed(self) -> frozenset[str]:
        """Return the uids of the pods on faulty nodes that are not replaced yet: too many are at a time."""
        left = self.observed.disruptions_left
        faulty = [pod.uid for pod in self._faulty if pod.uid not in self._in_doubt]
        return frozenset() if left is None else frozenset(faulty[max(0, left) :])

    @cached_property
    def _in_doubt(self) -> frozenset[str]:
        """Return the uids of pods on nodes that are not ready of which too few are missing in the training.

        Which of them train, the number of nodes that train does not tell: those that have been not ready for
        longest are replaced first.
        """
        size = self._world_size
        if size is None or not self.on_not_ready_nodes:
            return frozenset()
        silent = {pod.uid for pod in self._running if self.is_silent(pod)}
        not_ready = {pod.uid for pod in self.on_not_ready_nodes} - silent
        lost = [pod for pod in self._faulty if pod.uid in not_ready]
        num_missing = max(0, len(self._running) - size - len(silent))
        return frozenset(pod.uid for pod in lost[num_missing:])

    @cached_property
    def _faulty(self) -> list[Pod]:
        """Return the pods on faulty nodes; not those of deleted nodes, which make no steps.

        The rendezvous pod uses no GPU: it is replaced for a lost node, and stays on an unhealthy one.
        """
        store = self.observed.rendezvous
        faulty = [
            pod
            for pod in (*self.pods, *([store] if store is not None else []))
            if not (pod.ended or pod.deleting or self.observed.node_of(pod).gone)
            and (self._on_lost_node(pod) or (pod is not store and self._unhealthy_reason(pod)))
        ]
        return sorted(faulty, key=lambda pod: self.observed.node_of(pod).since)

    def _may_be_replaced(self, pod: Pod) -> bool:
        return pod.uid not in self.postponed and pod.uid not in self._in_doubt

    def on_lost_node(self, pod: Pod) -> bool:
        """Return whether the node of ``pod`` is lost, and the pod may be replaced."""
        return self._on_lost_node(pod) and self._may_be_replaced(pod)

    def unhealthy_reason(self, pod: Pod) -> Reason | None:
        """Return why ``pod`` is on an unhealthy node and may be replaced; None if it is not."""
        return self._unhealthy_reason(pod) if self._may_be_replaced(pod) else None

    def on_unhealthy_node(self, pod: Pod) -> bool:
        """Return whether ``pod`` runs on a node that, or whose GPUs, are unhealthy, and may be replaced."""
        return self.unhealthy_reason(pod) is not None

    def _unhealthy_reason(self, pod: Pod) -> Reason | None:
        if pod.ended:
            return None
        marks = self._marks(pod.node).items()
        believed = (reason for reason, since in marks if self.now >= since + GRACE_SECONDS)
        return next((reason for reason in believed if not self.refusal(reason)), None)

    def _marks(self, name: str) -> dict[Reason, float]:
        """Return the believed marks of a node that concern the job, and since when each is seen."""
        node = self.observed.nodes.get(name)
        marks = {} if node is None else self._credible_marks(node)
        return {} if marks and self._no_healthy_node else marks

    def _credible_marks(self, node: NodeView) -> dict[Reason, float]:
        """Return the marks of ``node`` that concern the job, without those that most nodes have."""
        marks = {}
        if node.problem and not self._wrong_detector:
            marks[Reason.UNHEALTHY_NODE] = node.problem_since
        if node.unhealthy and self.job.spec.gpus_per_node > 0 and not self._wrong_exporter:
            marks[Reason.UNHEALTHY_GPU] = node.unhealthy_since
        return marks

    def _on_lost_node(self, pod: Pod) -> bool:
        """Return whether the node of ``pod`` is deleted, or not ready and no progress proves it runs.

        A silent pod's node counts as lost before it is not ready.
        """
        node = self.observed.node_of(pod)
        if node.gone or self.is_silent(pod):
            return True
        if node.ready:
            return False
        participates = pod.uid in self._running_uids or pod is self.observed.rendezvous
        if participates and pod.uid in self.observed.heard.alive | self._training_uids:
            return False
        if self.refusal(Reason.NODE_LOST) or (participates and self._world_includes_not_ready):
            return False
        dropped = participates and self._world_excludes_not_ready
        return dropped or self.now >= node.since + GRACE_SECONDS

    @property
    def _world_includes_not_ready(self) -> bool:
        """Return whether as many nodes train as pods run, so that those on not-ready nodes train too.

        An unreachable pod that is being deleted may be one of them: a lost pod is then replaced only once
        that pod is gone, and until then as many nodes train as should.
        """
        size = self._world_size
        return size is not None and size >= len(self._running)

    @property
    def _world_excludes_not_ready(self) -> bool:
        """Return whether training goes on without the pods on not-ready nodes."""
        size, num_not_ready = self._world_size, len(self.on_not_ready_nodes)
        return size is not None and 0 < num_not_ready <= len(self._running) - size

    @cached_property
    def _training_uids(self) -> frozenset[str]:
        """Return the uids of the pods whose ranks tell of recent progress."""
        answer = self.observed.any_progress
        ranks = answer.ranks if answer is not None else ()
        recent = (r for r in ranks if r.seconds_since_progress < _RECENT_PROGRESS_SECONDS)
        return frozenset(rank.pod for rank in recent)

    @property
    def _world_size(self) -> int | None:
        """Return how many nodes train together; None if the latest progress is too old to rely on."""
        latest, answer = self._latest_progress_time, self.observed.any_progress
        if latest is None or answer is None or self.now >= latest + _RECENT_PROGRESS_SECONDS:
            return None
        return answer.num_nodes

    @property
    def _latest_progress_time(self) -> float | None:
        """Return the Unix time of the newest step, or other progress, of the processes that answer."""
        answer = self.observed.any_progress
        if answer is None:
            return None
        if answer.seconds_since_progress is not None:
            return self.now - answer.seconds_since_progress
        return seconds(answer.status.last_step_time)

    @cached_property
    def _running(self) -> tuple[Pod, ...]:
        """Return the current pods that run and are not being deleted, on nodes of any state."""
        return tuple(pod for pod in self.pods if pod.running and not pod.deleting)

    @cached_property
    def _running_uids(self) -> frozenset[str]:
        return frozenset(pod.uid for pod in self._running)


class Reason(StrEnum):
    """A reason to delete a pod; docs/reasons.md has the same table."""

    SUSPENDED = "Suspended"
    """The spec suspends the job."""
    SPEC_CHANGED = "SpecChanged"
    """The spec changed what pods run."""
    SCALED = "Scaled"
    """``nodes.max`` changed, and Kueue's group has a fixed size."""
    SCALED_DOWN = "ScaledDown"
    """There are more pods than ``nodes.max``; pods that do not run yet go first."""
    REVISION_CHANGED = "RevisionChanged"
    """A new pod is needed, and the existing ones are of another revision."""
    RESUMED = "Resumed"
    """The job is resumed before its earlier pods are gone."""
    JOB_ENDED = "JobEnded"
    """The job is complete or has failed; ``cleanPods`` decides which pods go."""
    PROGRAM_FAILED = "ProgramFailed"
    """The program failed in other pods, and to replace these does not suffice."""
    GROUP_ENDED = "GroupEnded"
    """Kueue evicted the group, or it has too few pods left."""
    PREVIOUS_ATTEMPT = "PreviousAttempt"
    """The pod belongs to an earlier attempt."""
    NO_PROGRESS = "NoProgress"
    """The job makes no progress, and a restart in place did not help or is not possible."""
    NODE_LOST = "NodeLost"
    """The node of the pod is lost, or its kubelet does not delete the pod."""
    UNHEALTHY_GPU = "UnhealthyGPU"
    """A GPU of the pod's node is unhealthy."""
    UNHEALTHY_NODE = "UnhealthyNode"
    """The pod's node is marked as unhealthy."""
    POD_ENDED = "PodEnded"
    """The pod has ended."""
    UNSCHEDULABLE = "Unschedulable"
    """The pod excludes distrusted nodes and cannot be scheduled on any other."""
    LABEL_REMOVED = "LabelRemoved"
    """The pod has lost the label that the operator watches."""
    RESTORED = "Restored"
    """A backup brought the pod back without its owner: it has an earlier key, and may run twice."""
    OUTDATED = "Outdated"
    """The rendezvous pod is for another spec, size, revision or restart, or its labels were changed."""


NODE_FAULTS = frozenset({Reason.NODE_LOST, Reason.UNHEALTHY_GPU, Reason.UNHEALTHY_NODE})
"""Inferred from reports about nodes: limited per minute, over all jobs."""
FAULTS = NODE_FAULTS | {Reason.NO_PROGRESS}
"""Never acted on while the control plane has lost contact with most nodes."""
DISRUPTION_PERCENT = 10
"""Part of all pods that may be deleted per minute for NODE_FAULTS, unless the options say otherwise."""


@dataclass(frozen=True)
class Delete:
    """An object to delete; a pod only if it still has this ``uid``."""

    kind: str
    name: str
    uid: str = ""
    grace_seconds: int | None = None
    """None: the object's own grace period; 0: force deletion."""
    reason: Reason | None = None
    """Why a pod is deleted; None for other kinds."""


SHORT_LIVED_SECONDS = 60.0
"""A pod that failed sooner after its start is restarted with a delay."""
_MIN_DELAY, _MAX_DELAY = 10.0, 300.0
_MAX_LINE = 1024

_SIGNALS = {137: "SIGKILL", 143: "SIGTERM"}
UNFIT_NODE = "UnfitNode"
"""The preflight found the node of a pod too slow."""
START_ERROR = "StartError"
"""The container runtime could not start the main container: the image is wrong, or a device is gone."""
INIT_CONTAINER_FAILED = "InitContainerFailed"
HARDWARE_CODES = (128 + 4, 128 + 7, 128 + 11)
"""SIGILL, SIGBUS, SIGSEGV."""
_START_ERRORS = (START_ERROR, "ContainerCannotRun")  # of containerd and of others
OUT_OF_MEMORY = "OOMKilled"
"""The kubelet's reason; a restart, on another node or from a snapshot, may need less memory."""
EVICTED, PROBE_FAILED = "Evicted", "ProbeFailed"
"""The pod exceeded its own limit of local storage; a probe of its main container failed."""
_TAKEN_REASONS = (
    *(EVICTED, "Terminated", "NodeShutdown", "Shutdown", "Preempting", "Preempted"),
    *("UnexpectedAdmissionError", "NodeAffinity", "NodeLost"),
)
_TAKEN_FOR_RESOURCES = "OutOf"
"""Reasons of a pod that the kubelet ended or rejected, whatever the exit codes of its containers are."""
_NODE_PRESSURE = ("The node had condition", "The node was low on resource", "Pod was rejected")
"""In the message of a pod that was rejected or evicted for the state of its node."""
_REASONS = {
    EXIT_ERROR: ("ProgramError", "the program failed"),
    EXIT_USAGE: ("InvalidJob", "the job's files or data are wrong"),
    EXIT_DIVERGED: ("Diverged", "the loss or its gradient is no longer finite"),
    EXIT_STORAGE: ("StorageError", "the output could not be written"),
}


@dataclass(frozen=True)
class Failure:
    """The failure of one pod."""

    pod: Pod
    infrastructure: bool
    """Whether the infrastructure failed, which costs no restart; else the program did."""
    reason: str
    """For machines, in CamelCase."""
    message: str
    """For people."""

    @property
    def is_short_lived(self) -> bool:
        """Return whether the pod failed soon after its start, or never started."""
        ended = self.pod.finished or self.pod.created
        return ended - (self.pod.started or ended) < SHORT_LIVED_SECONDS

    @property
    def error_line(self) -> str:
        """Return the last line of the container's termination message."""
        lines = [line.strip() for line in self.pod.message.splitlines() if line.strip()]
        return lines[-1][:_MAX_LINE] if lines else ""


def failure_of(pod: Pod) -> Failure | None:
    """Return why ``pod`` failed; None if it has not failed, or is being deleted.

    A pod with the condition DisruptionTarget failed for the infrastructure, as for a ``podFailurePolicy``.
    """
    if not pod.ended or pod.succeeded or pod.deleting:
        return None
    if pod.disruption:
        return _infrastructure(pod, pod.disruption, pod.disruption_message)
    if pod.reason in _TAKEN_REASONS or pod.reason.startswith(_TAKEN_FOR_RESOURCES):
        return _taken(pod)
    return _of_exit_code(pod)


def _of_exit_code(pod: Pod) -> Failure:
    if pod.exit_code is None:  # kubelet rejected, evicted or lost it
        return _infrastructure(pod, pod.reason or "PodLost", pod.message or "never ran")
    if pod.reason == OUT_OF_MEMORY:
        return _program(pod, OUT_OF_MEMORY, "out of memory")
    if pod.init_container and pod.exit_code not in _SIGNALS:
        return _program(pod, INIT_CONTAINER_FAILED, f"init container {pod.init_container} failed")
    if pod.reason in _START_ERRORS:
        return _program(pod, START_ERROR, "its container could not be started")
    if _is_probe_failed(pod):
        return _program(pod, PROBE_FAILED, "stopped by the kubelet, as after a failed probe")
    if pod.exit_code == EXIT_STOPPED:
        return _infrastructure(pod, "Stopped", "asked to stop; it left a checkpoint")
    if pod.exit_code == EXIT_UNFIT:
        return _with_line(_infrastructure(pod, UNFIT_NODE, f"node {pod.node} is unfit"))
    if pod.exit_code in _SIGNALS:
        return _infrastructure(pod, "Killed", f"{_SIGNALS[pod.exit_code]} from outside")
    return _program(pod, *_REASONS.get(pod.exit_code, ("ProgramError", "the program failed")))


def retry_time(failure: Failure, num_restarts: int) -> float:
    """Return the Unix time at which the pod or the gang may be restarted.

    At once if the pod was not short-lived, or if this is the program's first failure; else after a delay
    that doubles with ``num_restarts``, which were for the same reason.
    """
    ended = failure.pod.finished or failure.pod.created
    num_delays = num_restarts + failure.infrastructure
    if not failure.is_short_lived or num_delays == 0:
        return ended
    return ended + min(_MAX_DELAY, _MIN_DELAY * 2.0 ** min(num_delays - 1, 10))


def _is_probe_failed(pod: Pod) -> bool:
    """Return whether a probe has ended ``pod``: the kubelet stopped it, and nobody disrupts it.

    The status of a pod does not tell that its probe failed; events do, which may be dropped.
    """
    is_stopped = pod.exit_code in _SIGNALS or pod.exit_code == EXIT_STOPPED
    return pod.has_probe and is_stopped and pod.reason in ("", "Error") and not pod.init_container


def _taken(pod: Pod) -> Failure:
    """Return the failure of a pod that the kubelet ended or rejected, without DisruptionTarget.

    The kubelet's eviction manager (``pkg/kubelet/eviction/eviction_manager.go``) sets that condition, with
    the reason TerminationByKubelet, where it evicts for the node's pressure. ``localStorageEviction``, for
    the limit of an emptyDir, of the pod's or of a container's ephemeral storage, calls ``evictPod`` without
    it: such an eviction is the program's. ``Admit`` rejects pods of a node under pressure as Evicted, too,
    and kubelets before 1.26 set the condition never: their messages differ.
    """
    if pod.reason != EVICTED:
        return _infrastructure(pod, pod.reason, pod.message or "ended by the kubelet")
    if pod.message.startswith(_NODE_PRESSURE):
        return _infrastructure(pod, "NodePressure", pod.message)
    return _program(pod, EVICTED, "evicted for a limit of its own")


def _infrastructure(pod: Pod, reason: str, text: str) -> Failure:
    return Failure(pod, True, _camel(reason), f"{pod.name}: {text.strip()}")


def _program(pod: Pod, reason: str, text: str) -> Failure:
    code = "" if pod.exit_code is None else f"exit code {pod.exit_code}, "
    return _with_line(Failure(pod, False, _camel(reason), f"{pod.name}: {code}{text}"))


def _with_line(failure: Failure) -> Failure:
    line = failure.error_line
    return replace(failure, message=f"{failure.message}: {line}") if line else failure


def _camel(reason: str) -> str:
    """Return ``reason`` as a valid reason of a condition."""
    letters = "".join(c for c in reason if c.isascii() and c.isalnum())[:128]
    return letters if letters[:1].isalpha() else f"Pod{letters}"
