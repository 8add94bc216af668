"""Throughput is that of the device, which works behind the host; MFU names the peak that it means."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.trainer.outputs import records

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.order import BatchShares
from fluxtrain.model.parameters import run_flops
from fluxtrain.parallel.distributed import World
from fluxtrain.report.metrics import Clock, Speedometer
from fluxtrain.report.observer import Observer
from fluxtrain.report.records import Evaluation
from fluxtrain.runtime.devices import find_peak
from fluxtrain.state.run_state import RunState, claim

HOST_SECONDS, STEP_SECONDS, EVALUATION_SECONDS = 0.01, 1.0, 30.0
BATCH = 16


@dataclass
class Device:
    """A device that works behind the host, on a clock that only work and waiting move."""

    now: float = 0.0
    """Seconds of the host."""
    busy_until: float = 0.0

    def queue(self, seconds: float) -> None:
        """Give the device work; the host goes on."""
        self.now += HOST_SECONDS
        self.busy_until = max(self.busy_until, self.now) + seconds

    def finish(self) -> None:
        """Wait until the device has done it."""
        self.now = max(self.now, self.busy_until)

    def clock(self) -> Clock:
        return Clock(self.finish, lambda: self.now)


@dataclass
class Run:
    """A run whose steps take `STEP_SECONDS` of the device."""

    observer: Observer
    device: Device
    state: RunState = field(default_factory=lambda: RunState(0, 0))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.device.queue(STEP_SECONDS)
            self.state = RunState(self.state.step + 1, self.state.samples + BATCH)

    def evaluate(self) -> None:
        self.observer.on_evaluate_begin(self.state)
        self.device.queue(EVALUATION_SECONDS)
        self.device.finish()  # its loss is read
        self.observer.on_evaluate_end(self.state, Evaluation(0.5, [None] * 8, 4, ()))

    def log(self) -> None:
        self.observer.log_step(self.state, 1.0, 1.0, 1e-3)


def make_config(**changes: object) -> RunConfig:
    return resolve({"preset": "micro", "logging": {"metrics_port": 0}, **changes})


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    config, device, world = make_config(), Device(), World.alone()
    assert config.schedule.global_batch_size == BATCH
    paths = RunPaths(tmp_path, tmp_path, tmp_path)
    with ExitStack() as stack, world.exit_stack:
        observer = Observer(config, paths, world, stack, device.clock())
        shares = BatchShares.of(config, 1)
        observer.open_logs(claim(tmp_path / "checkpoints"), RunState(0, 0), None, "", shares, 9, 9)
        observer.on_train_begin()
        yield Run(observer, device)


def test_an_evaluation_between_two_log_lines_takes_nothing_from_the_time_of_the_steps(
    run: Run, tmp_path: Path
) -> None:
    run.step(3)
    run.evaluate()
    run.step(2)
    run.log()
    (record,) = [record for record in records(tmp_path) if "train_loss" in record]
    true = 5 * BATCH / (5 * STEP_SECONDS + 2 * HOST_SECONDS)
    assert record["samples_per_second"] == pytest.approx(true, rel=1e-3)
    assert record["seconds"] == pytest.approx(5 * STEP_SECONDS, rel=0.01)


def test_a_log_line_ends_where_the_device_has_finished(run: Run, tmp_path: Path) -> None:
    for _ in range(3):
        run.step(4)
        run.log()
    rates = [record["samples_per_second"] for record in records(tmp_path)]
    assert rates == pytest.approx([BATCH / STEP_SECONDS] * 3, rel=0.01)


def test_a_checkpoint_waits_for_the_steps_before_it(run: Run) -> None:
    run.step(3)
    with run.observer.saving(run.state):
        run.device.now += 7.0
    assert run.observer.train_seconds == pytest.approx(3 * STEP_SECONDS, rel=0.01)


def test_mfu_and_flops_follow_from_the_throughput() -> None:
    config = make_config(preset="mlperf-schnell")
    speedometer = Speedometer(config, World(0, 0, 4, World.alone().device))
    speed = speedometer.measure(samples=4 * 330, seconds=10.0)
    assert speed.samples_per_second == pytest.approx(132.0)
    assert speed.tflops_per_gpu == pytest.approx(33 * 20.4137, rel=1e-5), "20.414 TFLOP a sample"
    assert speed.mfu is None, "of a CPU"
    speedometer.peak = find_peak("AMD Instinct MI325X", "bfloat16")
    speed = speedometer.measure(samples=2 * 4 * 330, seconds=20.0)
    assert speed.mfu == pytest.approx(33 * 20.4137 / 1307.4, rel=1e-5)


def test_flops_are_those_of_the_sizes_that_were_trained_on() -> None:
    config = make_config(preset="dev-lora", initial_weights="w", data={"buckets": {}})
    largest, small = config.image_tokens, 40 * 96
    assert (largest, run_flops(config, largest)) == (4096, run_flops(config))
    speedometer = Speedometer(config, World.alone())
    for samples, tokens in ((8, largest), (3, small), (8, small)):
        speedometer.count(samples, tokens)
    speed = speedometer.measure(samples=19, seconds=1.0)
    expected = 8 * run_flops(config, largest) + 11 * run_flops(config, small)
    assert speed.tflops_per_gpu == pytest.approx(expected / 1e12, rel=1e-9)
    speedometer.count(8, small)
    speed = speedometer.measure(samples=27, seconds=2.0)
    assert speed.tflops_per_gpu == pytest.approx(8 * run_flops(config, small) / 1e12, rel=1e-9)


def test_the_time_left_is_that_of_the_samples_left() -> None:
    speedometer = Speedometer(make_config(preset="micro", schedule={"steps": 10}), World.alone())
    speedometer.total_samples = 90  # of 160, if no batch had fewer
    speed = speedometer.measure(samples=30, seconds=6.0)
    assert speed.remaining_seconds == pytest.approx(12.0)
    assert speed.step_seconds == pytest.approx(1.8)


def test_a_record_names_the_peak_or_says_that_it_is_unknown(run: Run, tmp_path: Path) -> None:
    run.step()
    run.log()
    (record,) = records(tmp_path)
    assert (record["mfu"], record["mfu_peak"]) == (None, "unknown")
    assert record["tflops_per_gpu"] > 0
    assert record["memory_allocated_bytes"] > 1 << 20
    assert record["memory_reserved_bytes"] is None, "a CPU's process reserves nothing"


@pytest.mark.parametrize(
    ("device", "dtype", "text"),
    [
        ("NVIDIA H200", "bfloat16", "H200 dense bfloat16 989.4 TFLOP/s"),
        ("AMD Instinct MI300X VF", "bfloat16", "MI300X dense bfloat16 1307.4 TFLOP/s"),
        ("NVIDIA H200", "float32", "H200 dense float32 66.9 TFLOP/s"),
        ("NVIDIA H200", "float16", "None"),
        ("NVIDIA H200", "fp8", "H200 dense fp8 1978.9 TFLOP/s"),
        ("AMD Instinct MI250X", "fp8", "None"),
        ("NVIDIA H100 PCIe", "bfloat16", "None"),
        ("a GPU of tomorrow", "bfloat16", "None"),
    ],
)
def test_the_peak_is_of_the_device_and_the_type(device: str, dtype: str, text: str) -> None:
    assert str(find_peak(device, dtype)) == text
