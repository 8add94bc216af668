"""The numbers that Prometheus scrapes and the operator reads: one registry per process, base units."""

from __future__ import annotations

import threading
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric

from fluxtrain.contract.progress import LOADING, Phase

_STEP_BUCKETS = (0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30, 60, 120)


class _LateGauge(Gauge):
    """A gauge that says nothing before its first value: a run that resumes did not fall back to 0."""

    _is_set = False

    def set(self, value: float) -> None:
        """Have this ``value`` from now on."""
        super().set(value)
        self._is_set = True

    def collect(self) -> list[Metric]:
        """Return the gauge, without a sample as long as it has no value."""
        found = list(super().collect())
        if not self._is_set:
            for metric in found:
                metric.samples = []
        return found


class Metrics:
    """The Prometheus metrics of one trainer process, in a registry of their own; base units."""

    def __init__(self) -> None:
        """Register every metric; ``registry`` is what the server exports."""
        self.registry = registry = CollectorRegistry()

        def gauge(name: str, text: str) -> Gauge:
            return _LateGauge(f"fluxtrain_{name}", text, registry=registry)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"fluxtrain_{name}", text, registry=registry)

        self.step = gauge("step", "Optimizer steps done.")
        self.samples = gauge("samples", "Training samples used.")
        self.train_loss = gauge("train_loss", "Loss of the last logged step.")
        self.eval_loss = gauge("eval_loss", "Loss of the last evaluation.")
        self.eval_loss_by_timestep = Gauge(
            "fluxtrain_eval_loss_by_timestep",
            "Loss of the last evaluation at one timestep.",
            ["timestep"],
            registry=registry,
        )
        self.learning_rate = gauge("learning_rate", "Learning rate of the last logged step.")
        self.grad_norm = gauge("grad_norm", "Global gradient norm before clipping.")
        self.samples_per_second = gauge("samples_per_second", "Training throughput, all ranks.")
        self.mfu = gauge("mfu_ratio", "Model FLOPs used over the devices' dense peak.")
        self.memory = gauge("memory_bytes", "Most memory allocated so far on this rank's device.")
        self.last_progress = Gauge(
            "fluxtrain_last_progress_timestamp_seconds",
            "Unix time of the last finished step; 0 before the first one.",
            registry=registry,
        )
        self.remaining = gauge("remaining_seconds", "Estimated time to the last step.")
        self.checkpoint_step = gauge("checkpoint_step", "Step of the newest complete checkpoint.")
        self.step_seconds = Histogram(
            "fluxtrain_step_seconds",
            "Mean time of a step between two log lines, evaluation and sampling left out.",
            buckets=_STEP_BUCKETS,
            registry=registry,
        )
        self.data_wait = counter("data_wait_seconds", "Time that training waited for data.")
        self.checkpoint_stall = counter(
            "checkpoint_stall_seconds", "Time that training waited for checkpoints."
        )
        self.bad_samples = counter("bad_samples", "Samples that could not be read.")


class Progress:
    """The last known progress, as JSON for the operator and as numbers for whoever asks."""

    def __init__(self) -> None:
        """Start with nothing known."""
        self._values: dict[str, Any] = {"phase": LOADING}
        self._lock = threading.Lock()

    def update(self, **values: object) -> None:
        """Replace the given values and keep the others."""
        with self._lock:
            self._values = {**self._values, **values}

    def enter(self, phase: Phase, now: float) -> None:
        """Note that ``phase`` began at the Unix time ``now``."""
        self.update(phase=phase, aliveTime=now)

    def stepped(self, now: float, **values: object) -> None:
        """Note that a step ended at the Unix time ``now``, and replace the given values."""
        with self._lock:
            known = {"firstStepTime": now, **self._values}
            self._values = {**known, **values, "lastStepTime": now, "aliveTime": now}

    def read(self) -> dict[str, Any]:
        """Return all values."""
        with self._lock:
            return dict(self._values)
