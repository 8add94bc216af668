"""The operator's own metrics; base units, and no job's name in a label."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from fluxtrain.contract.resource.status import ProgressStatus
from fluxtrain_operator.job import Job
from fluxtrain_operator.names import Key
from fluxtrain_operator.planner.plan import Plan
from fluxtrain_operator.timestamps import seconds

PHASES = ("Pending", "Starting", "Running", "Suspended", "Restarting", "Complete", "Failed")
_FAST = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_SLOW = (1.0, 3.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)


@dataclass
class Metrics:
    """Counters and clocks, in a registry that is passed in."""

    registry: CollectorRegistry
    _phases: dict[Key, str] = field(default_factory=dict)
    _heard: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make the metrics."""
        prefix, registry = "fluxtrain_operator", self.registry
        self.reconcile_seconds = Histogram(
            f"{prefix}_reconcile_seconds",
            "Time of one reconcile.",
            buckets=_FAST,
            registry=registry,
        )
        self.reconcile_errors = Counter(
            f"{prefix}_reconcile_errors",
            "Reconciles that failed and come again.",
            registry=registry,
        )
        self.queue_length = Gauge(
            f"{prefix}_queue_length", "Jobs that wait for a reconcile.", registry=registry
        )
        self.jobs = Gauge(f"{prefix}_jobs", "Jobs by phase.", ["phase"], registry=registry)
        self.api_requests = Counter(
            f"{prefix}_api_requests",
            "Requests to the API server, those of watches and of the election left out.",
            ["method", "resource"],
            registry=registry,
        )
        self.pods_created = Counter(f"{prefix}_pods_created", "Pods asked for.", registry=registry)
        self.first_step_seconds = Histogram(
            f"{prefix}_time_to_first_step_seconds",
            "From a job's creation to the end of its first step.",
            buckets=_SLOW,
            registry=registry,
        )
        self.recovery_seconds = Histogram(
            f"{prefix}_recovery_seconds",
            "From the last known step of a job's processes to the first one of those that follow them.",
            buckets=_SLOW,
            registry=registry,
        )
        for phase in PHASES:
            self.jobs.labels(phase).set(0)
        self.watch_age = Gauge(
            f"{prefix}_watch_age_seconds",
            "Seconds since a watch last brought something.",
            ["kind"],
            registry=registry,
        )
        self.leader = Gauge(
            f"{prefix}_leader", "1 where this replica reconciles.", registry=registry
        )

    def asked(self, method: str, resource: str) -> None:
        """Note a request to the API server."""
        self.api_requests.labels(method, resource).inc()

    def heard(self, kind: str) -> None:
        """Note that the watch of ``kind`` brought something."""
        if kind not in self._heard:
            self.watch_age.labels(kind).set_function(lambda: time.time() - self._heard[kind])
        self._heard[kind] = time.time()

    def observe(self, key: Key, job: Job, decided: Plan) -> None:
        """Note what became of a job."""
        self.pods_created.inc(sum(wanted["kind"] == "Pod" for wanted in decided.create))
        self._note_first_step(job, decided.status.progress)
        self.is_in(key, decided.status.phase)

    def is_in(self, key: Key, phase: str | None) -> None:
        """Note the phase of a job."""
        if self._phases.get(key) != phase:
            self._count(self._phases.get(key), -1)
            self._phases[key] = phase or ""
            self._count(phase, 1)

    def forget(self, key: Key) -> None:
        """Drop a job that is no more."""
        self._count(self._phases.pop(key, None), -1)

    def _note_first_step(self, job: Job, progress: ProgressStatus | None) -> None:
        """Note how long a job took to its first step ever, or processes to theirs after others' last one.

        A status is written once, so nothing is counted twice, whoever leads. A pause is no recovery.
        """
        before = job.status.progress
        first = seconds(progress.first_step_time) if progress else None
        last = seconds(before.last_step_time) if before else None
        if first is None:
            return
        if last is None:
            self.first_step_seconds.observe(max(0.0, first - job.created))
        elif first > last and not _suspended_after(job, last):
            self.recovery_seconds.observe(first - last)

    def _count(self, phase: str | None, change: int) -> None:
        if phase in PHASES:
            self.jobs.labels(phase).inc(change)


def _suspended_after(job: Job, moment: float) -> bool:
    """Return whether the job was suspended, or resumed, after ``moment``."""
    changed = (
        seconds(c.last_transition_time) for c in job.status.conditions if c.type == "Suspended"
    )
    return any(time is not None and time > moment for time in changed)
