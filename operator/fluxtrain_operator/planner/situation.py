"""Situation: one job's pods grouped by state, as the planner's rules read them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from fluxtrain.contract.resource.status import Condition, ProgressStatus, Restarts
from fluxtrain_operator.job import Job, Manifest
from fluxtrain_operator.planner.failures import Failure, failure_of
from fluxtrain_operator.planner.node_health import (
    GRACE_SECONDS,
    control_plane_outage,
    gpu_exporter_fault,
)
from fluxtrain_operator.planner.observed import NodeView, Observed, Pod
from fluxtrain_operator.progress import Progress
from fluxtrain_operator.resources import supporting
from fluxtrain_operator.resources.gang import Gang, gang_of
from fluxtrain_operator.resources.queueing import Queueing, queueing_of
from fluxtrain_operator.revision import Revision
from fluxtrain_operator.timestamps import seconds

_UNRESPONSIVE_SECONDS = 30.0
"""If a pod still exists this long after its grace period, its kubelet is unresponsive."""
_RECENT_SECONDS = 60.0
"""Progress that is not older proves that the nodes of the present world run."""


@dataclass(frozen=True)
class Situation:
    """A job, its observed objects, and the time. Pods of ``attempt`` are current."""

    job: Job
    observed: Observed
    now: float
    attempt: int

    @staticmethod
    def of(job: Job, observed: Observed, now: float) -> Situation:
        """Return the situation in the attempt of the status; in that of the pods if the status was lost."""
        attempt = job.status.attempt
        if job.status.phase is None:
            attempt = max((pod.attempt for pod in observed.pods), default=0)
        return Situation(job, observed, now, attempt)

    def in_attempt(self, attempt: int) -> Situation:
        """Return the same situation in ``attempt``."""
        return self if attempt == self.attempt else replace(self, attempt=attempt)

    @property
    def stale(self) -> bool:
        """Return whether there are pods of a later attempt: then the status is out of date."""
        return any(pod.attempt > self.attempt for pod in self.observed.pods)

    @cached_property
    def queueing(self) -> Queueing:
        """Return how the job's pods are queued."""
        return queueing_of(self.job)

    @cached_property
    def gang(self) -> Gang:
        """Return the gang scheduling of the job, none if the cluster does not serve its API."""
        return gang_of(self.job, self.observed.missing_apis)

    @cached_property
    def current(self) -> tuple[Pod, ...]:
        """Return the pods of this attempt, by index."""
        pods = (pod for pod in self.observed.pods if pod.attempt == self.attempt)
        return tuple(sorted(pods, key=lambda pod: pod.index))

    @cached_property
    def previous(self) -> tuple[Pod, ...]:
        """Return the pods of earlier attempts."""
        return tuple(pod for pod in self.observed.pods if pod.attempt < self.attempt)

    @cached_property
    def active(self) -> tuple[Pod, ...]:
        """Return the current pods that run or will run, by index."""
        return tuple(
            pod
            for pod in self.current
            if not (
                pod.ended or pod.deleting or self.unreachable(pod) or self.on_unhealthy_node(pod)
            )
        )

    @cached_property
    def running(self) -> tuple[Pod, ...]:
        """Return the active pods whose agent runs."""
        return tuple(pod for pod in self.active if pod.running)

    @cached_property
    def lost_members(self) -> tuple[Pod, ...]:
        """Return the current pods that no longer train but still count as members of Kueue's group.

        For Kueue an unreachable pod runs, and one that succeeded is done: it would delete a replacement of
        either as an excess pod.
        """
        lost = (pod for pod in self.current if pod.succeeded or self.unreachable(pod))
        return tuple(pod for pod in lost if self.queueing.is_member(pod))

    @cached_property
    def revision_name(self) -> str | None:
        """Return the name of the job's revision; that of the pods if the status was lost."""
        of_pods = (pod.revision for pod in self.current if pod.revision)
        return self.job.status.revision or next(of_pods, None)

    @cached_property
    def revision(self) -> Revision:
        """Return what pods are made from: the job's revision, unless it was lost or the spec has changed."""
        stored = self.observed.revision
        is_known = stored is not None and stored.name == self.revision_name
        if stored is None or not is_known or not self.job.matches_hash(stored.spec_hash):
            return self.job.spec_revision
        return stored

    def has_other_revision(self, pod: Pod) -> bool:
        """Return whether new pods cannot train with ``pod``, as it is of another revision."""
        return pod.revision != self.revision.name

    def is_outdated_rendezvous(self, pod: Pod) -> bool:
        """Return whether the rendezvous pod was created for another spec, or for agents that are gone."""
        nodes = self.job.spec.nodes
        if not self.job.matches_hash(pod.spec_hash):
            return True
        if self.has_other_revision(pod):
            return not any(self.has_other_revision(agent) for agent in self.active)
        return pod.nodes != (nodes.min, nodes.max)

    @property
    def has_min_nodes(self) -> bool:
        """Return whether at least ``nodes.min`` pods run."""
        return len(self.running) >= self.job.spec.nodes.min

    @cached_property
    def failures(self) -> tuple[Failure, ...]:
        """Return the failures of current pods, the program's first."""
        failures = (failure for pod in self.current if (failure := failure_of(pod)) is not None)
        return tuple(sorted(failures, key=lambda f: (f.infrastructure, f.pod.index)))

    @cached_property
    def supporting_objects(self) -> tuple[Manifest, ...]:
        """Return all desired objects but the pods."""
        return tuple(supporting(self.job, self.gang, self.revision))

    @cached_property
    def restarts(self) -> Restarts:
        """Return the restarts so far: the largest counts that the status, pods and progress report."""
        before = self.job.status.restarts or Restarts()
        latest = self.latest_progress
        return Restarts(
            process=max(
                before.process,
                latest.process_restarts if latest else 0,
                *(pod.process_restarts for pod in self.observed.pods),
            ),
            pod=max([before.pod, *(pod.replacement for pod in self.observed.pods)]),
            gang=before.gang,
        )

    @property
    def charged_before(self) -> int:
        """Return the restarts of the status that count towards ``maxRestarts``.

        Older operators counted the restarts of all pods only.
        """
        before = self.job.status.restarts or Restarts()
        return before.gang if before.charged is None else before.charged

    @cached_property
    def charged_restarts(self) -> int:
        """Return how many restarts count so far: those of processes too, unless older trainers count them.

        Those also count restarts after the loss of another node.
        """
        before, latest = self.job.status.restarts or Restarts(), self.latest_progress
        is_older = latest is not None and not latest.status.phase_seconds
        added = 0 if is_older else self.restarts.process - before.process
        return self.charged_before + added

    @cached_property
    def latest_progress(self) -> Progress | None:
        """Return rank 0's newest progress: its answer, or its termination message, which may be newer."""
        reports = [self.observed.progress, *(pod.final_progress for pod in self.observed.pods)]
        progress = [report for report in reports if report is not None]
        return max(progress, key=lambda p: p.status.last_step_time or "", default=None)

    @property
    def progress(self) -> ProgressStatus | None:
        """Return the newest progress: the latest report, or that in the status."""
        before, latest = self.job.status.progress, self.latest_progress
        if latest is None or latest.status.last_step_time is None:
            return before
        known = (before.last_step_time if before else None) or ""
        is_newer = self.observed.progress is not None or latest.status.last_step_time >= known
        return latest.status if is_newer else before

    @property
    def last_step_time(self) -> float | None:
        """Return the Unix time of the last step."""
        return seconds(self.progress.last_step_time) if self.progress else None

    @property
    def has_stepped(self) -> bool:
        """Return whether the current processes have made a step."""
        answer = self.observed.progress
        if not self.has_min_nodes or self.last_step_time is None:
            return False
        if answer is not None and answer.status.last_step_time is None:
            return False
        began = sorted(pod.started or 0.0 for pod in self.running)[self.job.spec.nodes.min - 1]
        return self.last_step_time >= began

    @cached_property
    def on_not_ready_nodes(self) -> tuple[Pod, ...]:
        """Return the current pods that run on nodes that are not ready."""
        return tuple(pod for pod in self._running_current if not self._node(pod).ready)

    @cached_property
    def control_plane_outage(self) -> str:
        """Return why nodes that are not ready do not count as lost; empty if they do."""
        return control_plane_outage(self.observed.nodes.values(), self.now)

    @cached_property
    def gpu_exporter_fault(self) -> str:
        """Return why GPUs that are reported as unhealthy count as healthy; empty if they do not."""
        return gpu_exporter_fault(self.observed.nodes.values())

    @property
    def ignores_unhealthy_gpus(self) -> bool:
        """Return whether pods of the job stay on GPUs that are reported as unhealthy."""
        reported = any(self._node(pod).unhealthy for pod in self._running_current)
        return reported and self.job.spec.gpus_per_node > 0 and bool(self.gpu_exporter_fault)

    @property
    def node_recheck_time(self) -> float | None:
        """Return the Unix time at which to check again whether nodes are lost; None if all are ready.

        Changes of nodes without pods of the job do not requeue the job.
        """
        if self.ignores_unhealthy_gpus or (self.on_not_ready_nodes and self.control_plane_outage):
            return self.now + GRACE_SECONDS
        grace = [self._node(pod).since + GRACE_SECONDS for pod in self.on_not_ready_nodes]
        latest = self._latest_progress_time
        outdated = None if latest is None else latest + _RECENT_SECONDS
        return earliest(
            time for time in [*grace, outdated if grace else None] if time and time > self.now
        )

    @cached_property
    def excluded_nodes(self) -> tuple[str, ...]:
        """Return the nodes with unhealthy GPUs."""
        return tuple(sorted(n for n in self.observed.nodes if self._has_unhealthy_gpus(n)))

    @cached_property
    def avoided_nodes(self) -> tuple[str, ...]:
        """Return the nodes with silent pods: Kubernetes may report them as lost only later."""
        pods = [*self.observed.pods, self.observed.rendezvous]
        return tuple(sorted({pod.node for pod in pods if pod and self._is_silent(pod)}))

    def unreachable(self, pod: Pod) -> bool:
        """Return whether ``pod`` may still run, but its kubelet cannot report it."""
        return self.kubelet_unresponsive(pod) and not pod.ended

    def loss_of(self, pod: Pod) -> str:
        """Return a sentence about the unreachable ``pod``."""
        cause = ": its agent sends no heartbeats" if self._is_silent(pod) else ""
        return f"{pod.name}: node {pod.node} is lost{cause}"

    def kubelet_unresponsive(self, pod: Pod) -> bool:
        """Return whether the node of ``pod`` is lost, or its kubelet does not delete the pod."""
        timeout = self.deletion_timeout(pod)
        return self._on_lost_node(pod) or (timeout is not None and timeout <= self.now)

    def deletion_timeout(self, pod: Pod) -> float | None:
        """Return the Unix time from which a pod that is being deleted counts as unreachable."""
        if pod.deletion_deadline is None or not pod.node:
            return None
        return pod.deletion_deadline + _UNRESPONSIVE_SECONDS

    def on_unhealthy_node(self, pod: Pod) -> bool:
        """Return whether ``pod`` runs on a node with unhealthy GPUs."""
        return not pod.ended and self._has_unhealthy_gpus(pod.node)

    def condition(self, kind: str) -> Condition | None:
        """Return a condition of the status before."""
        return next((c for c in self.job.status.conditions if c.type == kind), None)

    def _has_unhealthy_gpus(self, name: str) -> bool:
        node = self.observed.nodes.get(name)
        if node is None or not node.unhealthy or self.job.spec.gpus_per_node == 0:
            return False
        return not self.gpu_exporter_fault

    def _on_lost_node(self, pod: Pod) -> bool:
        """Return whether the node of ``pod`` is deleted, or not ready and no progress proves it runs.

        A silent pod's node counts as lost before it is not ready.
        """
        node = self._node(pod)
        if node.gone or self._is_silent(pod):
            return True
        if node.ready:
            return False
        participates = pod in self._running_current or pod is self.observed.rendezvous
        if participates and pod.uid in self.observed.heard.alive:
            return False
        if self.control_plane_outage or (participates and self._world_includes_not_ready):
            return False
        dropped = participates and self._world_excludes_not_ready
        return dropped or self.now >= node.since + GRACE_SECONDS

    def _is_silent(self, pod: Pod) -> bool:
        """Return whether the agent in ``pod`` is lost; not while the control plane itself is cut off."""
        if not pod.running or pod.uid not in self.observed.heard.silent:
            return False
        return not (self.observed.nodes and self.control_plane_outage)

    @property
    def _world_includes_not_ready(self) -> bool:
        """Return whether as many nodes train as pods run, so that those on not-ready nodes train too.

        An unreachable pod that is being deleted may be one of them: a lost pod is then replaced only once
        that pod is gone, and until then as many nodes train as should.
        """
        size = self._world_size
        return size is not None and size >= len(self._running_current)

    @property
    def _world_excludes_not_ready(self) -> bool:
        """Return whether training goes on without the pods on not-ready nodes."""
        size, num_not_ready = self._world_size, len(self.on_not_ready_nodes)
        if size is None or num_not_ready == 0:
            return False
        return size <= len(self._running_current) - num_not_ready

    @property
    def _world_size(self) -> int | None:
        """Return how many nodes train together; None if the latest progress is too old to rely on."""
        latest, answer = self._latest_progress_time, self.observed.any_progress
        if latest is None or answer is None or self.now >= latest + _RECENT_SECONDS:
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
        times = (answer.alive_time, seconds(answer.status.last_step_time))
        return max((time for time in times if time is not None), default=None)

    @cached_property
    def _running_current(self) -> tuple[Pod, ...]:
        """Return the current pods that run and are not being deleted, on nodes of any state."""
        return tuple(pod for pod in self.current if pod.running and not pod.deleting)

    def _node(self, pod: Pod) -> NodeView:
        return self.observed.nodes.get(pod.node) or NodeView(pod.node)


def true_since(condition: Condition | None) -> float | None:
    """Return the Unix time since which a condition has been true; None if it is not."""
    if condition is None or condition.status != "True":
        return None
    return seconds(condition.last_transition_time)


def earliest(times: Iterable[float | None]) -> float | None:
    """Return the earliest of ``times``; None if there is none."""
    return min((time for time in times if time is not None), default=None)
