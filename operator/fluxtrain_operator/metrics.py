"""The operator's own metrics; base units, and no job's name in a label."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from fluxtrain_operator.job import Job
from fluxtrain_operator.plan import Plan
from fluxtrain_operator.work_queue import Key

PHASES = ("Pending", "Starting", "Running", "Suspended", "Restarting", "Complete", "Failed")
_FAST = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_SLOW = (1.0, 3.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)


@dataclass
class Metrics:
    """Counters and clocks, in a registry that is passed in."""

    registry: CollectorRegistry
    _phases: dict[Key, str] = field(default_factory=dict)
    _left_running: dict[Key, float] = field(default_factory=dict)
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
        self.pods_created = Counter(f"{prefix}_pods_created", "Pods asked for.", registry=registry)
        self.first_step_seconds = Histogram(
            f"{prefix}_time_to_first_step_seconds",
            "From a job's creation to its first step.",
            buckets=_SLOW,
            registry=registry,
        )
        self.recovery_seconds = Histogram(
            f"{prefix}_recovery_seconds",
            "From a job's last step before a loss to the first one after it, as reconciles saw it.",
            buckets=_SLOW,
            registry=registry,
        )
        self.watch_age = Gauge(
            f"{prefix}_watch_age_seconds",
            "Seconds since a watch last brought something.",
            ["kind"],
            registry=registry,
        )
        self.leader = Gauge(
            f"{prefix}_leader", "1 where this replica reconciles.", registry=registry
        )

    def heard(self, kind: str) -> None:
        """Note that the watch of ``kind`` brought something."""
        if kind not in self._heard:
            self.watch_age.labels(kind).set_function(lambda: time.time() - self._heard[kind])
        self._heard[kind] = time.time()

    def observe(self, key: Key, job: Job, decided: Plan) -> None:
        """Note what became of a job."""
        before, phase, now = job.status.phase, decided.status.phase, time.time()
        self.pods_created.inc(sum(wanted["kind"] == "Pod" for wanted in decided.create))
        if before == "Running" and phase == "Restarting":
            self._left_running[key] = now
        if phase == "Running" and before != "Running":
            left = self._left_running.pop(key, None)
            if left is not None:
                self.recovery_seconds.observe(now - left)
            elif decided.status.attempt == 1 and before in (None, "Pending", "Starting"):
                self.first_step_seconds.observe(now - job.created)
        self._phases[key] = phase or ""
        self._count()

    def forget(self, key: Key) -> None:
        """Drop a job that is no more."""
        self._phases.pop(key, None)
        self._left_running.pop(key, None)
        self._count()

    def _count(self) -> None:
        for phase in PHASES:
            self.jobs.labels(phase).set(sum(other == phase for other in self._phases.values()))
