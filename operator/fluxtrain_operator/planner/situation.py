"""Situation: one job's pods grouped by state, as the planner's rules read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Literal

from fluxtrain.contract.resource.status import (
    Condition,
    CountedRestarts,
    InPlaceRestart,
    PodReplacement,
    ProgressStatus,
    Restarts,
    StragglerStatus,
)
from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Job, Manifest, Revision
from fluxtrain_operator.base.names import duration, seconds, stamp
from fluxtrain_operator.base.reports import MembersReport, ProcessRestart, Progress
from fluxtrain_operator.planner.guard import START_ERROR, Failure, Guard, Reason, failure_of
from fluxtrain_operator.planner.observed import CreateFailure, Observed, Pod
from fluxtrain_operator.resources import supporting
from fluxtrain_operator.resources.scheduling import Gang, Queueing, gang_of, queueing_of
from fluxtrain_operator.resources.support import DISRUPTION_BUDGET

_UNRESPONSIVE_SECONDS = 30.0
"""If a pod still exists this long after its grace period, its kubelet is unresponsive."""
_RENDEZVOUS_SECONDS = 300.0


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

    def after(self, decision: Decision, attempt: int) -> Situation:
        """Return the situation in ``attempt``, which follows ``decision``; itself if nothing has changed."""
        after = replace(
            self,
            attempt=attempt,
            ordered=decision.in_place_restart,
            replaced=decision.pod_replacement,
            kept_group=self.group if decision.keeps_group else None,
        )
        return self if after == self else after  # keeps what was computed

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
        return max((pod.attempt for pod in self.observed.pods), default=0)

    @cached_property
    def queueing(self) -> Queueing:
        return queueing_of(self.job)

    @cached_property
    def gang(self) -> Gang:
        return gang_of(self.job)

    @cached_property
    def current(self) -> tuple[Pod, ...]:
        """Return the pods of this attempt, by index."""
        pods = (pod for pod in self.observed.pods if pod.attempt == self.attempt)
        return tuple(sorted(pods, key=lambda pod: pod.index))

    @cached_property
    def guard(self) -> Guard:
        return Guard(self.job, self.observed, self.now, self.current)

    @cached_property
    def previous(self) -> tuple[Pod, ...]:
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
        if stored is None or not is_known or stored.spec_hash != self.job.spec_hash:
            return self.job.spec_revision
        return stored

    def has_other_revision(self, pod: Pod) -> bool:
        """Return whether new pods cannot train with ``pod``, as it is of another revision."""
        return pod.revision != self.revision.name

    def matches_spec(self, pod: Pod) -> bool:
        """Return whether ``pod`` was created for the spec: by its revision, if that is known."""
        known = (self.observed.revision, self.job.spec_revision)
        stored = next((r for r in known if r is not None and r.name == pod.revision), None)
        return self.job.spec_hash == (pod.spec_hash if stored is None else stored.spec_hash)

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
        return len(self.running) >= self.job.spec.nodes.min

    @cached_property
    def rendezvous_problem(self) -> tuple[str, str] | None:
        """Return reason and message of why the rendezvous pod cannot start or has failed; else None."""
        pod = self.observed.rendezvous
        if pod is None or pod.deleting:
            return None
        if failure := failure_of(pod):
            return failure.reason, failure.message
        if pod.cannot_start or self.now < (self.rendezvous_deadline or inf):
            return pod.wait_reason if pod.cannot_start else None
        reason = pod.wait_reason[0] if pod.waiting else "NoReport" if pod.node else "NotScheduled"
        return reason, f"{pod.name}: has not started for {duration(self.now - pod.created)}"

    @property
    def rendezvous_deadline(self) -> float | None:
        """Return the Unix time from which it is a problem that the rendezvous pod has not started yet."""
        pod = self.observed.rendezvous
        if pod is None or pod.started is not None or pod.ended or pod.deleting or pod.gated:
            return None
        return pod.created + _RENDEZVOUS_SECONDS

    def include_rendezvous(self, failures: Iterable[CreateFailure]) -> bool:
        return any(names.is_rendezvous(self.job.name, failure.name) for failure in failures)

    @property
    def lacks_rendezvous(self) -> bool:
        """Return whether nodes that run must wait for the rendezvous pod.

        One that is replaced while they start is expected soon, unless it has a problem.
        """
        pod = self.observed.rendezvous
        if pod is None:
            return self.include_rendezvous(self.observed.create_failures)
        is_expected = self.job.status.phase == "Starting" and self.rendezvous_problem is None
        return not (pod.running or is_expected)

    @property
    def can_start(self) -> bool:
        """Return whether ``nodes.min`` pods and the rendezvous pod run."""
        return self.has_min_nodes and not self.lacks_rendezvous

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
            pod=max([before.pod, *map(self.replacement_number, self.observed.pods)]),
            gang=before.gang,
            counted=counted,
        )

    def replacement_number(self, pod: Pod) -> int:
        """Return the replacement number of ``pod``; 0 if it cannot be that: its annotation was changed."""
        status = self.job.status
        known = status.restarts.pod if status.restarts is not None else 0
        limit = known + max(self.job.spec.nodes.max, len(self.observed.pods))
        return pod.replacement if status.phase is None or pod.replacement <= limit else 0

    @cached_property
    def charged_restarts(self) -> int:
        """Return how many restarts count so far, those of processes too."""
        before = self.job.status.restarts or Restarts()
        return before.charged + self.restarts.process - before.process

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
        """Return the Unix time from which deadlines count; None if the job is not active."""
        return seconds(self.job.status.active_since)

    def condition(self, kind: str) -> Condition | None:
        """Return a condition of the status before."""
        return next((c for c in self.job.status.conditions if c.type == kind), None)


def true_since(condition: Condition | None) -> float | None:
    """Return the Unix time since which a condition has been true; None if it is not."""
    if condition is None or condition.status != "True":
        return None
    return seconds(condition.last_transition_time)


# Rank 0's newest report: its answer at /progress, or a termination message, which may be newer.
#
# What a pod that is gone reported last counts until a rank 0 answers. A trainer reports when it made steps by
# its own clock, which may differ from the operator's by hours, and how long before the last one was.


_LATENCY_SECONDS = 5.0
"""By how much the times of one step in two reports may differ."""


@dataclass(frozen=True)
class Report:
    """The progress in a report."""

    progress: Progress
    time: float
    """Unix time of the report."""
    is_final: bool = False
    """Whether it is the last one of processes that have ended."""

    @cached_property
    def last_step_time(self) -> float | None:
        """Return the Unix time of the last step; None before a step."""
        last, since = self._reported_last, self.progress.seconds_since_step
        if last is None or since is None:
            return last
        return max(0.0, self.time - max(0.0, since))

    @property
    def first_step_time(self) -> float | None:
        """Return the Unix time of the first step of the same processes; None before it."""
        first = seconds(self.progress.status.first_step_time)
        if first is None or self._reported_last is None or self.last_step_time is None:
            return None
        return self.last_step_time - (self._reported_last - first)

    @property
    def _reported_last(self) -> float | None:
        return seconds(self.progress.status.last_step_time)

    def follows(self, before: ProgressStatus | None) -> bool:
        """Return whether the last step is not older than that of ``before``."""
        if before is not None and _is_later_step(self.progress.status, before):
            return True
        last, known = self.last_step_time, seconds(before.last_step_time) if before else None
        is_exact = self.progress.seconds_since_step is None  # both by the trainer's clock
        latency = 0.0 if is_exact else _LATENCY_SECONDS
        return last is not None and (known is None or last >= known - latency)

    def status_after(self, before: ProgressStatus | None, pods: Sequence[Pod]) -> ProgressStatus:
        """Return the progress for the status, with the straggler if it runs in one of ``pods``.

        The time of the last step is that of ``before`` if it is the same step: each report has another one.
        """
        status, last = self.progress.status, self.last_step_time
        time, straggler = status.last_step_time, self._straggler(pods)
        if last is not None and self.progress.seconds_since_step is not None:
            known = before.last_step_time if before and before.step == status.step else None
            time = known if _is_same(known, last) else stamp(last)
        if time == status.last_step_time and straggler is None:
            return status
        return status.model_copy(update={"last_step_time": time, "straggler": straggler})

    def _straggler(self, pods: Sequence[Pod]) -> StragglerStatus | None:
        """Return the straggler; None if there is none, or if it runs in none of ``pods``."""
        slowest = self.progress.straggler
        pod = next((pod for pod in pods if slowest and pod.uid == slowest.pod), None)
        if slowest is None or pod is None:
            return None
        return StragglerStatus(
            rank=slowest.rank,
            pod=pod.name,
            node=pod.node,
            cause=slowest.cause,
            slowdown=slowest.slowdown,
        )


def _is_same(known: str | None, last: float) -> bool:
    """Return whether a step at ``known`` may be one that another report has at ``last``."""
    time = seconds(known)
    return time is not None and abs(last - time) <= _LATENCY_SECONDS


def newest_report(observed: Observed, now: float) -> Report | None:
    """Return the report with the latest step; None without a report."""
    answer, gone = observed.progress, observed.final_pod
    reports = [] if answer is None else [Report(answer, now - answer.age)]
    for pod in (*observed.pods, *([gone] if answer is None and gone is not None else [])):
        if pod.final_progress is not None:
            time = pod.finished or pod.created
            reports.append(Report(pod.final_progress, time, is_final=True))
    newest = max(reports, key=lambda report: report.last_step_time or 0.0, default=None)
    known = newest.progress.status if newest is not None else ProgressStatus()
    return next((r for r in reports if _is_later_step(r.progress.status, known)), newest)


def _is_later_step(status: ProgressStatus, other: ProgressStatus) -> bool:
    """Return whether the same processes made a later step: an answer that arrives late seems to be newer."""
    began = status.first_step_time
    return began is not None and began == other.first_step_time and status.step > other.step


# Restarts of processes that agents tell the rendezvous service: each is counted once.
#
# A generation ends at most once, and all agents tell its end before a later one can fail. So those
# after the newest counted generation of the attempt are new, whoever reports them, and however often.


MAX_COUNT = 2**31 - 1


def new_restarts(
    before: Restarts, heard: MembersReport, attempt: int
) -> tuple[ProcessRestart, ...]:
    """Return the restarts in ``heard`` that ``before`` does not count, by generation."""
    counted = before.counted
    if counted is None or not counted.attempt == attempt == heard.attempt:
        return ()
    return tuple(r for r in heard.restarts if r.generation > counted.generation)


def next_counted(before: Restarts, heard: MembersReport, attempt: int) -> CountedRestarts | None:
    """Return how far the restarts of ``attempt`` are counted with those in ``heard``.

    If the count was lost with the status in the middle of an attempt, it begins with the first answer; until
    then it is unchanged.
    """
    counted = before.counted
    newest = max((restart.generation for restart in heard.restarts), default=0)
    if counted is None or counted.attempt != attempt:
        if heard.attempt != attempt:
            return counted
        return CountedRestarts(attempt=attempt, generation=newest, process=before.process)
    new = new_restarts(before, heard, attempt)
    if not new:
        return counted
    process = min(MAX_COUNT, counted.process + len(new))
    return CountedRestarts(attempt=attempt, generation=newest, process=process)


@dataclass(frozen=True)
class Decision:
    """What happens to the job, and why."""

    action: Literal["run", "restart", "hold", "wait", "suspend", "complete", "fail"]
    """``hold`` changes nothing, ``wait`` creates nothing yet, ``restart`` restarts the gang."""
    reason: str = ""
    """For machines, in CamelCase."""
    message: str = ""
    """For people."""
    uses_restart: bool = False
    """Whether a restart counts towards ``restart.maxRestarts``."""
    exit_code: int | None = None
    error_line: str = ""
    cause: Reason = Reason.PREVIOUS_ATTEMPT
    """Why pods are deleted, if any are."""
    grace_seconds: int | None = None
    """Grace period of the deleted pods; None: that of their spec."""
    requeue_time: float | None = None
    """Unix time at which to plan again."""
    in_place_restart: InPlaceRestart | None = None
    """The restart of all processes inside the living pods, if ``run`` includes one."""
    pod_replacement: PodReplacement | None = None
    """The replacement of the pods in which the program failed, if ``run`` includes one."""
    keeps_group: bool = False
    """Whether the pods of a ``restart`` join Kueue's group of those before."""


RUN = Decision("run")


def restart_all(cause: Reason, message: str) -> Decision:
    """Return the restart of all pods, which uses no restart of the budget."""
    return Decision("restart", str(cause), message, cause=cause)


def fail(reason: str, message: str) -> Decision:
    return Decision("fail", reason, message, cause=Reason.JOB_ENDED)


def restarts_exhausted(situation: Situation, message: str) -> Decision | None:
    """Return the end of a job whose budget has no restart left; None if it has one."""
    limit = situation.job.spec.restart.max_restarts
    if situation.charged_restarts < limit:
        return None
    return fail("RestartsExhausted", f"{message}; {limit} restarts are used up")
