"""Prometheus metrics of one process."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.model.parameters import run_flops
from fluxtrain.parallel.distributed import World
from fluxtrain.report.progress import RankProgress, read_ranks
from fluxtrain.runtime.devices import Peak, find_peak
from fluxtrain.runtime.progress import Progress
from fluxtrain.state.run_state import RunState

_STEP_BUCKETS = (0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30, 60, 120)


_TERA = 1e12


@dataclass(frozen=True)
class Speed:
    """Training speed since the last log line."""

    samples_per_second: float
    """Of all ranks."""
    step_seconds: float
    remaining_seconds: float
    """Estimated time to the last step; 0 if nothing was measured."""
    tflops_per_gpu: float
    """Model TFLOP/s of each rank; recomputation is not counted."""
    mfu: float | None
    """Model FLOP/s over the dense peak of the GPUs; None if that is unknown."""
    memory: tuple[int, int | None]
    """Most bytes of this rank so far: in tensors on its GPU, or resident in its process without one; taken
    from the GPU by torch's allocator, which keeps what tensors have freed."""


@dataclass(frozen=True)
class StepMetric:
    """The names of a value of each logged step; empty where it does not appear."""

    name: str
    """In metrics.jsonl."""
    text: str = ""
    """Of the gauge and of its curve."""
    gauge: str = ""
    """After ``fluxtrain_``."""
    progress: str = ""
    """In /progress."""
    group: str = ""
    """In TensorBoard, in Weights & Biases and on the dashboard."""
    curve: tuple[str, str, str] | None = None
    """Title, legend and Grafana's unit of its curve on the dashboard."""
    scale: float = 1.0
    """Factor of the gauge, which is in base units."""
    is_recorded: bool = True
    """Whether metrics.jsonl has it."""


def _metric(
    text: str = "", gauge: str = "", progress: str = "", group: str = "", **names: Any
) -> Any:
    """Return a field with the names of a `StepMetric`."""
    own = {"text": text, "gauge": gauge, "progress": progress, "group": group}
    return field(metadata={**own, **names})


@dataclass(frozen=True)
class LoggedStep:
    """All that a logged step reports; each field is a row of `STEP_METRICS`, None if it is unknown."""

    step: int = _metric("Optimizer steps done.", "step")
    samples: int = _metric("Training samples used.", "samples", progress="samples")
    train_loss: float = _metric(
        "Loss of the last logged step.", "train_loss", progress="trainLoss", group="loss"
    )
    grad_norm: float = _metric(
        *("Global gradient norm before clipping.", "grad_norm"),
        group="optimizer",
        curve=("Gradient norm", "norm", "short"),
    )
    learning_rate: float = _metric(
        "Learning rate of the last logged step.", "learning_rate", group="optimizer"
    )
    samples_per_second: float = _metric(
        *("Training throughput, all ranks.", "samples_per_second", "samplesPerSecond", "speed"),
        curve=("Throughput", "samples/s", "short"),
    )
    tflops_per_gpu: float = _metric(
        *("Model FLOPs of each rank; recomputation is not counted.", "model_flops_per_second"),
        group="speed",
        curve=("Model FLOP/s", "FLOP/s", "flops"),
        scale=_TERA,
    )
    mfu: float | None = _metric(
        *("Model FLOPs used over the devices' dense peak.", "mfu_ratio", "mfu", "speed"),
        curve=("MFU", "MFU", "percentunit"),
    )
    mfu_peak: str = _metric()
    memory_allocated_bytes: int = _metric(
        "Most memory allocated so far on this rank's device.", "memory_bytes", group="memory"
    )
    memory_reserved_bytes: int | None = _metric(
        *("Most memory that torch's allocator took so far from the GPU.", "memory_reserved_bytes"),
        group="memory",
    )
    seconds: float = _metric(progress="trainSeconds", group="speed")
    data_wait_seconds: float = _metric(group="speed")
    remaining_seconds: float = _metric(
        *("Estimated time to the last step.", "remaining_seconds", "remainingSeconds"),
        is_recorded=False,
    )


STEP_METRICS = tuple(StepMetric(each.name, **each.metadata) for each in fields(LoggedStep))


class _UnsetGauge(Gauge):
    """A gauge without a sample until it is set, so that a resumed run does not report 0."""

    _is_set = False

    def set(self, value: float) -> None:
        super().set(value)
        self._is_set = True

    def collect(self) -> list[Metric]:
        """Return the metric, without samples if no value is set."""
        metrics = list(super().collect())
        if not self._is_set:
            for metric in metrics:
                metric.samples = []
        return metrics


class _PhaseSeconds(Collector):
    """The seconds that a process has spent in each phase."""

    def __init__(self, progress: Progress) -> None:
        """Read them from ``progress`` at each scrape."""
        self._progress = progress

    def collect(self) -> Iterator[Metric]:
        text = "Time spent in each phase by this process."
        family = CounterMetricFamily("fluxtrain_phase_seconds", text, labels=["phase"])
        for phase, spent in self._progress.read()["phaseSeconds"].items():
            family.add_metric([phase], spent)
        yield family


class _Stalls(Collector):
    """The time without progress of each rank of the node, and how long its phase may last without."""

    def __init__(self, ranks: Callable[[], list[RankProgress]]) -> None:
        self._ranks = ranks

    def collect(self) -> Iterator[Metric]:
        """Return one sample of each metric for every rank; none outside of torchrun."""
        since = GaugeMetricFamily(
            "fluxtrain_since_progress_seconds", "Time since the last progress.", labels=["rank"]
        )
        limit = GaugeMetricFamily(
            "fluxtrain_stall_limit_seconds",
            "Time without progress after which a rank counts as stalled, by its present phase.",
            labels=["rank"],
        )
        now = time.monotonic()
        for rank in self._ranks():
            since.add_metric([str(rank.rank)], rank.seconds_since_progress(now))
            limit.add_metric([str(rank.rank)], rank.stall_seconds())
        yield from (since, limit)


_NO_WAITS = "of the last logged step, without waits for other ranks."
_RANK_TIMES = {
    "compute": ("compute", f"Time of the forward passes {_NO_WAITS}"),
    "data": (
        "data_wait",
        "Time per step that a rank waited for data, between the last two log lines.",
    ),
    "backward": ("backward", f"Time of the backward passes {_NO_WAITS}"),
    "optimizer": ("optimizer", "Time of the optimizer step of the last logged step."),
}
"""By the fields of `RankTimes`: names and texts of the gauges."""


class Metrics:
    """The Prometheus metrics of one trainer process, in their own registry and in base units."""

    def __init__(
        self,
        progress: Progress | None = None,
        ranks: Callable[[], list[RankProgress]] = read_ranks,
    ) -> None:
        """Register every metric in ``registry``; the phases are those of ``progress``.

        ``ranks`` returns the progress of each rank of the node.
        """
        self.registry = registry = CollectorRegistry()
        registry.register(_PhaseSeconds(progress or Progress()))
        registry.register(_Stalls(ranks))

        def gauge(name: str, text: str) -> Gauge:
            return _UnsetGauge(f"fluxtrain_{name}", text, registry=registry)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"fluxtrain_{name}", text, registry=registry)

        self.of_step = {
            each.name: gauge(each.gauge, each.text) for each in STEP_METRICS if each.gauge
        }
        self.eval_loss = gauge("eval_loss", "Loss of the last evaluation.")
        self.target_samples = gauge(
            "target_samples", "Samples at which the run will reach its target; NaN if unknown."
        )
        self.reference_samples_low = gauge(
            "reference_samples_low", "Samples that few of MLPerf's reference runs need fewer than."
        )
        self.reference_samples_high = gauge(
            "reference_samples_high", "Samples that few of MLPerf's reference runs need more than."
        )
        self.eval_loss_by_timestep = Gauge(
            "fluxtrain_eval_loss_by_timestep",
            "Loss of the last evaluation at one timestep.",
            ["timestep"],
            registry=registry,
        )
        self.last_progress = Gauge(
            "fluxtrain_last_progress_timestamp_seconds",
            "Unix time of the last finished step; 0 before the first one.",
            registry=registry,
        )
        self.checkpoint_step = gauge("checkpoint_step", "Step of the newest complete checkpoint.")
        self.snapshot_step = gauge("snapshot_step", "Step of the newest snapshot in memory.")
        self.snapshot_bytes = gauge("snapshot_bytes", "Memory of this rank's snapshots.")
        self.snapshots_paused = gauge(
            "snapshots_paused", "1 while no snapshots are taken as memory is short, else 0."
        )
        self.of_rank = {
            name: Gauge(f"fluxtrain_rank_{gauge}_seconds", text, ["rank"], registry=registry)
            for name, (gauge, text) in _RANK_TIMES.items()
        }
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
        self.snapshot_stall = counter(
            "snapshot_stall_seconds", "Time that training waited for snapshots in memory."
        )
        self.bad_samples = counter("bad_samples", "Samples that could not be read.")

    def set_step(self, step: LoggedStep) -> None:
        """Set the gauges of `STEP_METRICS` that ``step`` has a value of."""
        for each in STEP_METRICS:
            value = getattr(step, each.name)
            if each.gauge and value is not None:
                self.of_step[each.name].set(each.scale * value)


class Speedometer:
    """Measures the speed between log lines."""

    def __init__(self, config: RunConfig, world: World) -> None:
        self._config, self._world = config, world
        self._last = (0, 0.0)
        self._flops = dict[int, int]()  # of a sample, by its image tokens
        self._counted = list[tuple[int, int]]()  # samples and image tokens of each step
        self.total_samples = config.schedule.steps * config.schedule.global_batch_size
        """Of the whole run."""
        self.peak: Peak | None = None
        """What MFU is a fraction of; None if it is unknown."""
        if world.device.type == "cuda":
            name = torch.cuda.get_device_name(world.device)
            precision = config.precision
            self.peak = find_peak(name, precision.compute if precision.fp8 == "none" else "fp8")

    def start(self, run: RunState) -> None:
        """Measure from ``run`` on."""
        self._last = (run.samples, run.train_seconds)

    def count(self, samples: int, image_tokens: int) -> None:
        """Count a step on ``samples`` of one size; of steps that are not counted, all have the largest."""
        self._counted.append((samples, image_tokens))

    def measure(self, samples: int, seconds: float) -> Speed:
        """Return the speed since the last call; in all, ``samples`` took ``seconds`` of training.

        The device must have finished them by then.
        """
        used, spent = samples - self._last[0], seconds - self._last[1]
        self._last = (samples, seconds)
        rate = used / spent if spent > 0 else 0.0
        batch = self.total_samples / self._config.schedule.steps
        left = self.total_samples - samples
        tflops = rate * self._mean_flops() / _TERA / self._world.size
        return Speed(
            samples_per_second=rate,
            step_seconds=spent * batch / max(used, 1),
            remaining_seconds=left / rate if rate else 0.0,
            tflops_per_gpu=tflops,
            mfu=tflops * _TERA / self.peak.flops if self.peak else None,
            memory=_most_memory(self._world.device),
        )

    def _mean_flops(self) -> float:
        """Return the FLOPs of a sample, the mean of those counted since the last call."""
        counted = self._counted or [(1, self._config.image_tokens)]
        self._counted = []
        return sum(n * self._flops_of(tokens) for n, tokens in counted) / sum(n for n, _ in counted)

    def _flops_of(self, image_tokens: int) -> int:
        if image_tokens not in self._flops:
            self._flops[image_tokens] = run_flops(self._config, image_tokens)
        return self._flops[image_tokens]


def _most_memory(device: torch.device) -> tuple[int, int | None]:
    if device.type != "cuda":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, None
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


# The clock of training time, paused during evaluation, sampling and saving.
#
# A GPU works behind the host, which only queues its work. So where time is taken, the host first
# waits until the device has finished: otherwise the last steps would be counted as the evaluation
# that follows them.


class Clock:
    """Measures the seconds spent training."""

    def __init__(
        self,
        finish_device: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Count from now on; ``finish_device`` waits until the device has done what is queued."""
        self._finish_device, self._now = finish_device, now
        self._total, self._since = 0.0, now()

    def start(self, seconds: float) -> None:
        """Count from now on, beside ``seconds`` spent before a resume."""
        self._total, self._since = seconds, self._now()

    def pause(self) -> None:
        """Stop counting when the device has finished."""
        self._finish_device()
        self._total += self._now() - self._since

    def resume(self) -> None:
        self._since = self._now()

    def finished_seconds(self) -> float:
        """Return the seconds counted until the device has finished; only valid while the clock runs."""
        self._finish_device()
        return self.seconds

    @property
    def seconds(self) -> float:
        """Return the seconds counted so far; only valid while the clock runs."""
        return self._total + self._now() - self._since
