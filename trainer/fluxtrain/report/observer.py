"""What a run reports: only rank 0 logs, every node serves metrics."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from pkgutil import resolve_name

import torch

from fluxtrain.contract.process import (
    COMPILE,
    EVALUATE,
    FINISH,
    METRICS_FILE,
    SAMPLE,
    SAMPLES_FOLDER,
    SAVE,
    STEP,
    RunPaths,
)
from fluxtrain.contract.run.closed_division import Violation
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.loader import AnyOrder
from fluxtrain.data.order import BatchShares
from fluxtrain.data.sources import Sources
from fluxtrain.errors import one_line
from fluxtrain.parallel.distributed import World
from fluxtrain.report.endpoint import Endpoint
from fluxtrain.report.metrics import STEP_METRICS, Clock, LoggedStep, Speedometer
from fluxtrain.report.records import RUN_LOG, Evaluation, RunLog, read_records
from fluxtrain.report.run_logs import Convergence, Ledger, RunLogs
from fluxtrain.report.stragglers import RankTimesReport
from fluxtrain.runtime.step_times import StepTimes
from fluxtrain.state.run_state import Fence, RunState

_MAX_UNREADABLE_LOGGED = 20


class Observer:
    """Reports the events of a training to its logs, Prometheus and /progress."""

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        world: World,
        closing: ExitStack,
        clock: Clock | None = None,
    ) -> None:
        """Serve /metrics and /progress on local rank 0; no log is opened yet. ``closing`` closes all.

        ``clock`` is that of the host and ``world``'s device if left out.
        """
        self.config, self.paths, self.world = config, paths, world
        self._endpoint = Endpoint(config, paths, world)
        self.metrics, self.progress = self._endpoint.metrics, self._endpoint.progress
        self.alive = self._endpoint.alive
        self.num_unreadable, self.last_fault = 0, ""
        self._logged_faults = set[str]()  # of the validation set
        self._closing = closing
        self.step_times = StepTimes(world.device)
        self._clock = clock or Clock(partial(_finish, world.device))
        self._speedometer = Speedometer(config, world)
        self._data_wait = 0.0
        self._order: AnyOrder | None = None
        self._ledger: Ledger | None = None
        self._logs: RunLogs | None = None  # on rank 0
        self._convergence: Convergence | None = None  # on rank 0
        if world.local_rank == 0:
            self._endpoint.start(closing)
        factor = config.logging.straggler_factor
        self._rank_times = RankTimesReport(world, self.metrics, self.progress, factor)

    def use(self, config: RunConfig) -> None:
        """Report on ``config``, whose number of steps the data have given; no log is open yet."""
        self.config = config
        self._speedometer = Speedometer(config, self.world)

    def open_logs(
        self,
        fence: Fence,
        run: RunState,
        saved_step: int | None,
        parameters: str,
        shares: BatchShares,
        num_train: int | None = None,
        num_validation: int | None = None,
    ) -> None:
        """Open the logs at ``run``'s step; ``num_train`` and ``num_validation`` are numbers of samples.

        They are None if the data are opened after MLPerf's clock has started.

        ``parameters`` says how many there are; ``saved_step`` is the step of the newest checkpoint. Raises
        FencedError if there is a newer start, whose logs would be replaced.
        """
        self._clock.start(run.train_seconds)
        self._speedometer.start(run)
        self.metrics.of_step["step"].set(run.step)
        self.metrics.of_step["samples"].set(run.samples)
        self.metrics.checkpoint_step.set(saved_step or 0)
        self.progress.update(trainSecondsBefore=run.train_seconds)
        if run.eval_loss is not None:
            self.metrics.eval_loss.set(run.eval_loss)
        if self.config.logging.ledger:
            self._ledger = Ledger(self.paths.output, run.step, self.world, fence)
            self._closing.callback(self._ledger.close)
        own, lengths = (self.config, self.paths, self.world), (num_train, num_validation)
        events = self._on_head, self._closing
        open_log: Callable[..., RunLog | None] = resolve_name(RUN_LOG)
        log = open_log(*own, run, fence, shares, saved_step, lengths, *events)
        if log is not None:
            self._logs = RunLogs(self.config, shares, self.paths, run, self._closing, fence, log)
            self._endpoint.show(self._logs.page.live, self._logs.page.file)
            records = read_records(self.paths.output / METRICS_FILE)
            self._convergence = Convergence(
                self.config, records, self.metrics, self.progress, log.band
            )
            port = self.progress.read().get("port")
            peak = self._speedometer.peak
            self._logs.print_summary(run, self.world, parameters, port, peak)

    def on_data_opened(self, sources: Sources, order: AnyOrder) -> None:
        """Log what was opened; ``order`` is that of the training samples."""
        self._order = order
        self.progress.update(epochs=order.epochs(self.config.schedule.steps))
        self._speedometer.total_samples = order.samples(self.config.schedule.steps)
        if self._logs is not None:
            self._logs.on_data_opened(sources, order)

    def on_rule_broken(self, violation: Violation, run: RunState) -> None:
        """Log that ``run`` breaks a rule of MLPerf's closed division, unless it is open already."""
        if self._logs is not None:
            self._logs.on_rule_broken(violation, run)

    def on_warm_up(self) -> None:
        """Report that passes before training begin, of which the first compile the model."""
        self._endpoint.set_phase(COMPILE)

    def on_train_begin(self) -> None:
        """Start the clock after every rank is loaded, and before any rank reads a sample."""
        self.world.barrier()
        self.progress.update(steps=self.config.schedule.steps)
        self._endpoint.set_phase(STEP)
        self._clock.resume()
        if self._logs is not None:
            self._logs.mlperf.ready()
        self.world.barrier()

    def on_step_begin(self, run: RunState, image_tokens: int) -> None:
        """Report that the step after ``run`` begins, on samples with ``image_tokens``."""
        step = run.step + 1
        assert self._order is not None, "its samples are opened"
        self._speedometer.count(self._order.count(run.step), image_tokens)
        is_logged = step % self.config.logging.every_steps == 0
        self.step_times.begin_step(is_logged or step == self.config.schedule.steps)
        if self._logs is not None:
            self._logs.mlperf.block_start(run.samples)

    def on_step_end(self, step: int) -> None:
        """Report that ``step`` was submitted to the device."""
        self.metrics.of_step["step"].set(step)
        assert self._order is not None, "its samples are opened"
        epoch = self._order.epochs(step)
        self._endpoint.step_done(step=step, epoch=epoch, trainSeconds=self._clock.seconds)
        if self._logs is not None:
            self._logs.console.advance(step)

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Count the time inside as waiting for data."""
        begin = time.perf_counter()
        with self.step_times.waiting_for_data():
            yield
        waited = time.perf_counter() - begin
        self._data_wait += waited
        self.metrics.data_wait.inc(waited)
        self.alive()

    def log_unreadable(self, faults: tuple[str, ...]) -> None:
        """Count this rank's unreadable training samples and log the first of them."""
        for fault in faults:
            self.num_unreadable, self.last_fault = self.num_unreadable + 1, fault
            self.metrics.bad_samples.inc()
            if self.num_unreadable <= _MAX_UNREADABLE_LOGGED:
                print(
                    f"skipped an unreadable sample: {one_line(fault)}", file=sys.stderr, flush=True
                )

    def log_used(self, step: int, indices: list[int]) -> None:
        """Write the indices of the samples that this rank used in ``step`` to the ledger."""
        if self._ledger is not None:
            self._ledger.write(step, indices)

    def log_step(self, run: RunState, train_loss: float, grad_norm: float, rate: float) -> None:
        """Log the metrics of the last step of ``run``, and the throughput since the last log interval."""
        seconds = self._clock.finished_seconds()
        speed = self._speedometer.measure(run.samples, seconds)
        step = LoggedStep(
            *(run.step, run.samples, train_loss, grad_norm, rate),
            *(speed.samples_per_second, speed.tflops_per_gpu, speed.mfu),
            str(self._speedometer.peak or "unknown"),
            *speed.memory,
            *(seconds, self._data_wait, speed.remaining_seconds),
        )
        self.metrics.set_step(step)
        self.metrics.step_seconds.observe(speed.step_seconds)
        self.progress.update(
            **{each.progress: getattr(step, each.name) for each in STEP_METRICS if each.progress}
        )
        lines = self._rank_times.log(self.step_times.take(), speed.step_seconds)
        if self._logs is not None:
            self._logs.log_step(step)
            for line in lines:
                self._logs.console.print_line(line)
        self._data_wait = 0.0

    def on_evaluate_begin(self, run: RunState) -> Callable[[int], None]:
        """Pause the training clock; return a function to call with the number of samples evaluated."""
        self._clock.pause()
        self._endpoint.set_phase(EVALUATE)
        if self._logs is None:
            return lambda samples: self.alive()
        show = self._logs.on_evaluate_begin(run)

        def advance(samples: int) -> None:
            self.alive()
            show(samples)

        return advance

    def log_unreadable_validation(self, result: Evaluation) -> None:
        """Count the unreadable validation samples and log the first of them, each once per run."""
        self.metrics.eval_loss.set(result.loss)  # before the check: an alert fires on NaN
        if not self.world.is_main:
            return
        self.metrics.bad_samples.inc(len(result.faults))
        for fault in result.faults:
            known = fault in self._logged_faults
            if not known and len(self._logged_faults) < _MAX_UNREADABLE_LOGGED:
                self._logged_faults.add(fault)
                print(
                    f"skipped an unreadable validation sample: {one_line(fault)}", file=sys.stderr
                )

    def on_evaluate_end(self, run: RunState, result: Evaluation) -> None:
        """Log the evaluation loss and resume the training clock."""
        for index, loss in enumerate(result.by_timestep):
            if loss is not None:
                self.metrics.eval_loss_by_timestep.labels(f"{index}/8").set(loss)
        self.progress.update(evalLoss=result.loss)
        if self._convergence is not None:
            self._convergence.add(run.samples, result.loss)
        if self._logs is not None:
            self._logs.on_evaluate_end(run, result)
        self._endpoint.set_phase(STEP)
        self._clock.resume()

    @contextmanager
    def saving(self, run: RunState) -> Iterator[None]:
        """Pause the training clock; count the time inside as waiting for a checkpoint."""
        self._clock.pause()
        begin = time.perf_counter()
        with self._endpoint.phase(SAVE):
            yield
        self.metrics.checkpoint_stall.inc(time.perf_counter() - begin)
        self.progress.update(trainSeconds=run.train_seconds)
        self._clock.resume()

    def on_saved(self, step: int) -> None:
        """Report that the checkpoint of ``step`` is complete; thread-safe."""
        if self._logs is not None:
            self._logs.mlperf.saved(step)
        self.metrics.checkpoint_step.set(step)
        self.progress.update(checkpointStep=step, checkpointTime=time.time())

    def _on_head(self, records: int, sha256: str) -> None:
        """Report the head of the MLPerf log's chain; thread-safe."""
        self.progress.update(logHead={"records": records, "sha256": sha256})

    def on_snapshot(self, step: int, stall: float) -> None:
        """Report that the snapshot of ``step`` is complete and stalled training; thread-safe."""
        self.metrics.snapshot_step.set(step)
        self.metrics.snapshot_stall.inc(stall)
        self.progress.update(snapshotStep=step)

    def on_snapshot_memory(self, size: int, is_paused: bool) -> None:
        """Report the bytes of this rank's snapshots, and whether none are taken at present; thread-safe."""
        self.metrics.snapshot_bytes.set(size)
        self.metrics.snapshots_paused.set(is_paused)
        self.progress.update(snapshotBytes=size, snapshotsPaused=is_paused)
        if size == 0:
            self.metrics.snapshot_step.set(0)
            self.progress.update(snapshotStep=0)

    @contextmanager
    def sampling(self, step: int) -> Iterator[Path]:
        """Pause the training clock; yield the file for the sample images of ``step``."""
        self._clock.pause()
        path = self.paths.output / SAMPLES_FOLDER / f"step_{step:07d}.png"
        with self._endpoint.phase(SAMPLE):
            yield path
        self._clock.resume()

    def on_sampled(self, step: int, path: Path) -> None:
        """Report that the sample images of ``step`` are at ``path``."""
        if self._logs is not None:
            self._logs.on_sampled(step, path)

    def on_run_stop(self, run: RunState) -> None:
        """Stop MLPerf's clock: the last step or the target is reached, saving and sampling follow."""
        if self._logs is not None:
            self._logs.mlperf.run_stop(run.status, run.samples)

    def on_train_end(self, run: RunState) -> None:
        """Draw the loss curve and report the final status."""
        self._endpoint.set_phase(FINISH)
        if self._logs is not None:
            self._logs.on_train_end(run)
        self.progress.update(status=run.status)

    @property
    def train_seconds(self) -> float:
        """Return the seconds spent training, over all resumes."""
        return self._clock.seconds


def _finish(device: torch.device) -> None:
    """Wait until ``device`` has done what is queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
