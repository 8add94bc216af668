"""The operator's metrics, in base units. Only the time spent has series per job, of at most a thousand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from fluxtrain.contract.resource.status import Status, TimeSpent
from fluxtrain_operator.base.job import Job
from fluxtrain_operator.base.names import Key, seconds
from fluxtrain_operator.base.node_health import NO_DISTRUST, Distrust
from fluxtrain_operator.planner.plan import Plan
from fluxtrain_operator.planner.status import finished

PHASES = ("Pending", "Starting", "Running", "Suspended", "Restarting", "Complete", "Failed")
TIME_PARTS = tuple(name for name in TimeSpent.model_fields if name != "until")
_MAX_NODES = 100
"""Series of node_distrust: those of the nodes that are distrusted most."""
_MAX_JOBS = 1000
"""Jobs with series of their own: the newest unfinished ones."""
_FAST = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_SLOW = (1.0, 3.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
_MAX_START_SECONDS = 366 * 86_400.0
"""A first step that is reported to be later than this after the creation of its job is not observed."""


@dataclass(eq=False)
class _DistrustCollector(Collector):
    """The distrust of nodes, read when it is scraped; nodes without faults have no series."""

    read: Callable[[], Distrust] = lambda: NO_DISTRUST

    def collect(self) -> Iterator[GaugeMetricFamily]:
        text = (
            "Faults attributed to a node, halved every four hours; from 2.5 on new pods exclude it."
        )
        family = GaugeMetricFamily("fluxtrain_operator_node_distrust", text, labels=["node"])
        distrust = self.read()
        for node in list(distrust.scores)[:_MAX_NODES]:
            family.add_metric([node], distrust.of(node))
        yield family


@dataclass(eq=False)
class _TimeCollector(Collector):
    """How the newest unfinished jobs spent their time, by the statuses that were written last."""

    _jobs: dict[Key, tuple[float, TimeSpent, float | None]] = field(default_factory=dict)
    """Time of creation, time spent and goodput of all unfinished jobs that have started."""

    def set(self, key: Key, job: Job, status: Status) -> None:
        if status.time_spent is None or finished(status):
            self.discard(key)
        else:
            self._jobs[key] = job.created, status.time_spent, status.goodput

    def discard(self, key: Key) -> None:
        self._jobs.pop(key, None)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        labels = ["namespace", "fluxtraining"]
        ratio = GaugeMetricFamily(
            "fluxtrain_operator_goodput_ratio",
            "Share of an unfinished job's time that was spent on steps that count.",
            labels=labels,
        )
        spent = GaugeMetricFamily(
            "fluxtrain_operator_spent_seconds",
            "Time of an unfinished job since its start, without suspensions, by how it was spent.",
            labels=[*labels, "part"],
        )
        newest = nlargest(_MAX_JOBS, self._jobs.items(), key=lambda item: (item[1][0], item[0]))
        for key, (_, times, goodput) in newest:
            if goodput is not None:
                ratio.add_metric(key, goodput)
            for part in TIME_PARTS:
                spent.add_metric([*key, part], getattr(times, part))
        yield from (ratio, spent)


@dataclass
class Metrics:
    """The metrics of ``registry``, and the state that they are computed from."""

    registry: CollectorRegistry
    _phases: dict[Key, str] = field(default_factory=dict)
    _last_event: dict[str, float] = field(default_factory=dict)
    """Unix time of the last watch event by kind."""

    def __post_init__(self) -> None:
        options: dict[str, Any] = {"namespace": "fluxtrain_operator", "registry": self.registry}
        self.reconcile_seconds = Histogram(
            "reconcile_seconds", "Duration of a reconcile.", buckets=_FAST, **options
        )
        self.reconcile_errors = Counter(
            "reconcile_errors", "Reconciles that failed and are retried.", **options
        )
        self.queue_length = Gauge("queue_length", "Jobs in the work queue.", **options)
        self.jobs = Gauge("jobs", "Jobs by phase.", ["phase"], **options)
        for phase in PHASES:
            self.jobs.labels(phase).set(0)
        self.api_requests = Counter(
            "api_requests",
            "Requests to the API server, without watches and leader election.",
            ["method", "resource"],
            **options,
        )
        self.pods_created = Counter("pods_created", "Pods whose creation was requested.", **options)
        self.first_step_seconds = Histogram(
            "time_to_first_step_seconds",
            "From a job's creation to the end of its first step.",
            buckets=_SLOW,
            **options,
        )
        self.recovery_seconds = Histogram(
            "recovery_seconds",
            "From the last step before a restart to the first step after it.",
            buckets=_SLOW,
            **options,
        )
        self.job_seconds = Counter(
            "job_seconds",
            "Time of all jobs by how it was spent; steps count as such until they are redone or stall.",
            ["part"],
            **options,
        )
        for part in TIME_PARTS:
            self.job_seconds.labels(part).inc(0)
        self.watch_age = Gauge(
            "watch_age_seconds", "Seconds since the last event of a watch.", ["kind"], **options
        )
        self.unreadable_objects = Counter(
            "unreadable_objects",
            "Objects that were skipped because this operator cannot read them.",
            ["kind"],
            **options,
        )
        self.unreadable_objects.labels("fluxtraining").inc(0)
        self.failing_watches = Gauge(
            "failing_watches",
            "1 if the last list or watch failed.",
            ["kind", "resource_namespace"],
            **options,
        )
        self.foreign_namespaces = Gauge(
            "foreign_namespaces", "Namespaces whose jobs another operator reconciles.", **options
        )
        self.leader = Gauge("leader", "1 if this replica is the leader.", **options)
        self._distrust = _DistrustCollector()
        self.registry.register(self._distrust)
        self._times = _TimeCollector()
        self.registry.register(self._times)

    def watch_distrust(self, read: Callable[[], Distrust]) -> None:
        """Call ``read`` for the distrust of nodes whenever it is scraped."""
        self._distrust.read = read

    def count_request(self, method: str, resource: str) -> None:
        self.api_requests.labels(method, resource).inc()

    def record_watch_event(self, kind: str) -> None:
        if kind not in self._last_event:
            self.watch_age.labels(kind).set_function(lambda: time.time() - self._last_event[kind])
        self._last_event[kind] = time.time()

    def record_plan(self, key: Key, job: Job, plan: Plan) -> None:
        """Record a plan for ``job`` that has been executed."""
        self.pods_created.inc(sum(desired["kind"] == "Pod" for desired in plan.create))
        self._observe_first_step(job, plan)
        self._count_time(job.status.time_spent, plan.status.time_spent)
        self._times.set(key, job, plan.status)
        self.set_phase(key, plan.status.phase)

    def record_refusal(self, key: Key, phase: str | None) -> None:
        """Record a job whose spec is rejected, or cannot be read."""
        self._times.discard(key)
        self.set_phase(key, phase)

    def set_phase(self, key: Key, phase: str | None) -> None:
        if self._phases.get(key) != phase:
            self._count(self._phases.get(key), -1)
            self._phases[key] = phase or ""
            self._count(phase, 1)

    def remove_job(self, key: Key) -> None:
        self._times.discard(key)
        self._count(self._phases.pop(key, None), -1)

    def _observe_first_step(self, job: Job, plan: Plan) -> None:
        """Observe the time to a job's first step, or from the last step before a restart to the next one.

        Each status is written once, so nothing is counted twice across leaders. A suspension is not a
        recovery.
        """
        before, progress = job.status.progress, plan.status.progress
        reported = progress.first_step_time if progress else None
        if reported is None or (before is not None and before.first_step_time == reported):
            return
        first = plan.first_step_time or seconds(reported) or 0.0
        if first - job.created > _MAX_START_SECONDS:
            return  # the clock of its node, or its program, is wrong
        last = seconds(before.last_step_time) if before else None
        if last is None:
            self.first_step_seconds.observe(max(0.0, first - job.created))
        elif first > last and not _suspended_after(job, last):
            self.recovery_seconds.observe(first - last)

    def _count_time(self, before: TimeSpent | None, after: TimeSpent | None) -> None:
        """Count the time that a status adds to the one before; a correction downwards counts nothing."""
        for part in TIME_PARTS if after is not None else ():
            added = getattr(after, part) - (getattr(before, part) if before is not None else 0.0)
            self.job_seconds.labels(part).inc(max(0.0, added))

    def _count(self, phase: str | None, change: int) -> None:
        if phase in PHASES:
            self.jobs.labels(phase).inc(change)


def _suspended_after(job: Job, moment: float) -> bool:
    """Return whether the job was suspended, or resumed, after ``moment``."""
    changed = (
        seconds(c.last_transition_time) for c in job.status.conditions if c.type == "Suspended"
    )
    return any(time is not None and time > moment for time in changed)
