"""Situation: one job's pods grouped by state, as the planner's rules read them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from fluxtrain.contract.resource.status import (
    Condition,
    InPlaceRestart,
    PodReplacement,
    ProgressStatus,
    Restarts,
)
from fluxtrain_operator.job import Job, Manifest
from fluxtrain_operator.members import ProcessRestart
from fluxtrain_operator.planner.failures import START_ERROR, Failure, failure_of
from fluxtrain_operator.planner.guard import Guard
from fluxtrain_operator.planner.observed import Observed, Pod
from fluxtrain_operator.planner.process_restarts import new_restarts, next_counted
from fluxtrain_operator.planner.report import Report, newest_report
from fluxtrain_operator.progress import Progress
from fluxtrain_operator.resources import DISRUPTION_BUDGET, supporting
from fluxtrain_operator.resources.gang import Gang, gang_of
from fluxtrain_operator.resources.queueing import Queueing, queueing_of
from fluxtrain_operator.revision import Revision
from fluxtrain_operator.timestamps import seconds

_UNRESPONSIVE_SECONDS = 30.0
_REMOVABLE_KINDS = frozenset(("ConfigMap", DISRUPTION_BUDGET))
"""If a pod still exists this long after its grace period, its kubelet is unresponsive."""


@dataclass(frozen=True)
class Situation:
    """A job, its observed objects, and the time. Pods of ``attempt`` are current."""

    job: Job
    observed: Observed
    now: float
    attempt: int
    ordered: InPlaceRestart | None = None
    """The restart in place that was decided now; None if there is none beyond that of the status."""
    replaced: PodReplacement | None = None
    """The same of a replacement of pods in which the program failed."""
    kept_group: int | None = None
    """The attempt that names Kueue's group, if a restart of all pods that was decided now keeps it."""

    @staticmethod
    def of(job: Job, observed: Observed, now: float) -> Situation:
        """Return the situation in the attempt of the status; in that of the pods if the status was lost."""
        attempt = job.status.attempt
        if job.status.phase is None:
            attempt = Situation(job, observed, now, 0).newest_attempt
        return Situation(job, observed, now, attempt)

    def in_attempt(self, attempt: int) -> Situation:
        """Return the same situation in ``attempt``."""
        return self if attempt == self.attempt else replace(self, attempt=attempt)

    def after(
        self, restart: InPlaceRestart | None, replacement: PodReplacement | None
    ) -> Situation:
        """Return the same situation after a restart in place and a replacement of pods were decided."""
        if restart is None and replacement is None:
            return self
        return replace(self, ordered=restart, replaced=replacement)

    def keeping_group(self, group: int) -> Situation:
        """Return the same situation after a restart of all pods within the ``group``."""
        return replace(self, kept_group=group)

    @property
    def group(self) -> int:
        """Return the attempt that names Kueue's group of the current pods: its number, or an earlier one."""
        status = self.job.status
        if self.kept_group is not None:
            return self.kept_group
        known = status.group_attempt if status.attempt == self.attempt else None
        return min(known or self.attempt, self.attempt)

    @property
    def in_place_restart(self) -> InPlaceRestart | None:
        """Return the newest restart in place of this attempt, None if there was none."""
        last = self.ordered or self.job.status.in_place_restart
        return last if last is not None and last.attempt == self.attempt else None

    @property
    def pod_replacement(self) -> PodReplacement | None:
        """Return the newest replacement of failed pods of this attempt, None if there was none."""
        last = self.replaced or self.job.status.pod_replacement
        return last if last is not None and last.attempt == self.attempt else None

    @property
    def ended_generation(self) -> tuple[int, int]:
        """Return the attempt and generation up to which generations must end; zeros if none must."""
        last = self.in_place_restart
        return (0, 0) if last is None else (last.attempt, last.generation)

    @property
    def stale(self) -> bool:
        """Return whether there are pods of a later attempt: then the status is out of date."""
        return self.newest_attempt > self.attempt

    @property
    def newest_attempt(self) -> int:
        """Return the newest attempt that there are pods of; 0 without pods."""
        return max((pod.attempt for pod in self.observed.pods), default=0)

    @cached_property
    def queueing(self) -> Queueing:
        """Return how the job's pods are queued."""
        return queueing_of(self.job)

    @cached_property
    def gang(self) -> Gang:
        """Return the gang scheduling of the job, none if the cluster does not serve its API."""
        return gang_of(self.job, self.observed.missing_apis)

    @property
    def removable_kinds(self) -> frozenset[str]:
        """Return the kinds of supporting objects of which a job can have superfluous ones."""
        return _REMOVABLE_KINDS | set(self.gang.kinds if self.gang.renames else ())

    @cached_property
    def current(self) -> tuple[Pod, ...]:
        """Return the pods of this attempt, by index."""
        pods = (pod for pod in self.observed.pods if pod.attempt == self.attempt)
        return tuple(sorted(pods, key=lambda pod: pod.index))

    @cached_property
    def guard(self) -> Guard:
        """Return the disruption guard of the current pods."""
        return Guard(self.job, self.observed, self.now, self.current)

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
                pod.ended
                or pod.deleting
                or self.unreachable(pod)
                or self.guard.on_unhealthy_node(pod)
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

    def matches_spec(self, pod: Pod) -> bool:
        """Return whether ``pod`` was created for the spec: its revision tells it, if that is known."""
        known = (self.observed.revision, self.job.spec_revision)
        stored = next((r for r in known if r is not None and r.name == pod.revision != ""), None)
        return self.job.matches_hash(pod.spec_hash if stored is None else stored.spec_hash)

    def is_outdated_rendezvous(self, pod: Pod) -> bool:
        """Return whether the rendezvous pod was created for another spec, or for agents that are gone.

        Also if a generation must end, of which it does not know, or if neither its Service nor the operator
        finds it by its labels and annotations.
        """
        nodes = self.job.spec.nodes
        if not self.matches_spec(pod) or pod.changed_labels:
            return True
        if self.has_other_revision(pod):
            return not any(self.has_other_revision(agent) for agent in self.active)
        is_known = pod.rendezvous_version == self.revision.rendezvous_version
        fits = is_known and pod.nodes == (nodes.min, nodes.max)
        return not fits or pod.ended_generation < self.ended_generation

    @property
    def has_min_nodes(self) -> bool:
        """Return whether at least ``nodes.min`` pods run."""
        return len(self.running) >= self.job.spec.nodes.min

    @cached_property
    def failures(self) -> tuple[Failure, ...]:
        """Return the failures of current pods, the program's first."""
        failures = (failure for pod in self.current if (failure := self._failure_of(pod)))
        return tuple(sorted(failures, key=lambda f: (f.infrastructure, f.pod.index)))

    def _failure_of(self, pod: Pod) -> Failure | None:
        """Return why ``pod`` failed: what starts on other nodes does not start for a fault of its node."""
        failure = failure_of(pod)
        if failure is None or failure.reason != START_ERROR:
            return failure
        starts = any(p.started and p.revision == pod.revision for p in self.observed.pods)
        return replace(failure, infrastructure=starts)

    @property
    def program_failures(self) -> tuple[Failure, ...]:
        """Return the failures of the program in current pods, by index."""
        return tuple(failure for failure in self.failures if not failure.infrastructure)

    @cached_property
    def supporting_objects(self) -> tuple[Manifest, ...]:
        """Return all desired objects but the pods."""
        manifests = supporting(self.job, self.gang, self.revision)
        left_out = () if self._needs_budget else (DISRUPTION_BUDGET,)
        return tuple(manifest for manifest in manifests if manifest["kind"] not in left_out)

    @property
    def _needs_budget(self) -> bool:
        """Return whether a pod runs or is about to: without any, a budget counts as violated.

        A pod that is not there yet is about to run, unless it will wait in a queue.
        """
        pods = [pod for pod in self.active if not pod.gated and not pod.unschedulable]
        return bool(pods) or not (self.active or self.job.spec.scheduling.queue_name)

    @cached_property
    def new_process_restarts(self) -> tuple[ProcessRestart, ...]:
        """Return the restarts of processes that agents tell and that are not counted yet."""
        before = self.job.status.restarts or Restarts()
        return new_restarts(before, self.observed.heard, self.attempt)

    @cached_property
    def restarts(self) -> Restarts:
        """Return the restarts so far: the largest counts that the status, agents, pods and progress report.

        Each is at most the number of those that happened. A pod reports those of its own agent, and all
        before it was created.
        """
        before = self.job.status.restarts or Restarts()
        counted = next_counted(before, self.observed.heard, self.attempt)
        latest = self.latest_progress
        return Restarts(
            process=max(
                before.process,
                counted.process if counted else 0,
                latest.process_restarts if latest else 0,
                *(pod.process_restarts for pod in self.observed.pods),
            ),
            pod=max([before.pod, *map(self._replacement, self.observed.pods)]),
            gang=before.gang,
            counted=counted,
        )

    def _replacement(self, pod: Pod) -> int:
        """Return the replacement number of ``pod``; 0 if it cannot be that: its annotation was changed."""
        status = self.job.status
        known = status.restarts.pod if status.restarts is not None else 0
        limit = known + max(self.job.spec.nodes.max, len(self.observed.pods))
        return pod.replacement if status.phase is None or pod.replacement <= limit else 0

    @property
    def charged_before(self) -> int:
        """Return the restarts of the status that count towards ``maxRestarts``.

        Older operators counted the restarts of all pods only.
        """
        before = self.job.status.restarts or Restarts()
        return before.gang if before.charged is None else before.charged

    @cached_property
    def charged_restarts(self) -> int:
        """Return how many restarts count so far: those of processes too, unless only older trainers do.

        Those also count restarts after the loss of another node.
        """
        before, latest = self.job.status.restarts or Restarts(), self.latest_progress
        is_older = latest is not None and not latest.status.phase_seconds
        added = self.restarts.process - before.process
        told = len(self.new_process_restarts)
        return self.charged_before + (min(added, told) if is_older else added)

    @cached_property
    def report(self) -> Report | None:
        """Return rank 0's newest report, None without one."""
        return newest_report(self.observed, self.now)

    @property
    def latest_progress(self) -> Progress | None:
        """Return the progress in rank 0's newest report, with times by the trainer's clock."""
        return self.report.progress if self.report is not None else None

    @cached_property
    def progress(self) -> ProgressStatus | None:
        """Return the newest progress: that of the newest report, or that in the status."""
        before, report = self.job.status.progress, self.report
        if report is None or report.last_step_time is None:
            return before
        is_newer = self.observed.progress is not None or report.follows(before)
        return report.status_after(before, self.current) if is_newer else before

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
        last = self.in_place_restart
        before = seconds(last.last_step_time) if last is not None else None
        return self.last_step_time >= began and (before is None or self.last_step_time > before)

    def unreachable(self, pod: Pod) -> bool:
        """Return whether ``pod`` may still run, but its kubelet cannot report it."""
        return self.kubelet_unresponsive(pod) and not pod.ended

    def loss_of(self, pod: Pod) -> str:
        """Return a sentence about the unreachable ``pod``."""
        cause = ": its agent sends no heartbeats" if self.guard.is_silent(pod) else ""
        return f"{pod.name}: node {pod.node} is lost{cause}"

    def kubelet_unresponsive(self, pod: Pod) -> bool:
        """Return whether the node of ``pod`` is lost, or its kubelet does not delete the pod."""
        timeout = self.deletion_timeout(pod)
        return self.guard.on_lost_node(pod) or (timeout is not None and timeout <= self.now)

    def deletion_timeout(self, pod: Pod) -> float | None:
        """Return the Unix time from which a pod that is being deleted counts as unreachable."""
        if pod.deletion_deadline is None or not pod.node:
            return None
        return pod.deletion_deadline + _UNRESPONSIVE_SECONDS

    @property
    def active_since(self) -> float | None:
        """Return the Unix time from which deadlines count; None if the job is not active.

        Older operators counted from the last admission.
        """
        status = self.job.status
        if status.active_since is None and status.start_time is not None:
            return true_since(self.condition("Admitted"))
        return seconds(status.active_since)

    def condition(self, kind: str) -> Condition | None:
        """Return a condition of the status before."""
        return next((c for c in self.job.status.conditions if c.type == kind), None)


def true_since(condition: Condition | None) -> float | None:
    """Return the Unix time since which a condition has been true; None if it is not."""
    if condition is None or condition.status != "True":
        return None
    return seconds(condition.last_transition_time)
