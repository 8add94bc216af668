"""What a run reports while it runs: only rank 0 logs, every node serves metrics."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from fluxtrain.checkpoint import RunState
from fluxtrain.contract.launch import (
    LEDGER_FOLDER,
    LOSS_FILE,
    METRICS_FILE,
    MLPERF_FILE,
    SAMPLES_FOLDER,
    RunPaths,
)
from fluxtrain.contract.progress import COMPLETE, EVALUATING, FINISHING, RUNNING, SAMPLING, SAVING
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.replicas import replicas
from fluxtrain.data.order import BatchShares
from fluxtrain.distributed import World
from fluxtrain.evaluate import Evaluation
from fluxtrain.gpus import peak_flops
from fluxtrain.mlperf import MLPerfLog, RunFacts
from fluxtrain.mlperf.machine import machine_facts
from fluxtrain.model.flops import training_flops
from fluxtrain.report.clock import Clock
from fluxtrain.report.console import Console, duration
from fluxtrain.report.endpoint import Endpoint
from fluxtrain.report.records import Records, drop_after, read_records

_MAX_FAULTS_TOLD = 20


@dataclass(frozen=True)
class StepFacts:
    """What is read from the device at a log interval."""

    step: int
    samples: int
    loss: float
    grad_norm: float
    learning_rate: float


class Observer:
    """Tells metrics.jsonl, the terminal, Prometheus, /progress and the MLPerf log what happens."""

    def __init__(self, config: RunConfig, paths: RunPaths, world: World) -> None:
        """Prepare to tell of the run that ``config`` describes; nothing is opened yet."""
        self.config, self.paths, self.world = config, paths, world
        self._endpoint = Endpoint(config, paths, world)
        self.metrics, self.progress = self._endpoint.metrics, self._endpoint.progress
        self.num_faults, self.last_fault = 0, ""
        self._left_out = dict[str, None]()  # validation samples that are named already
        self._closing = ExitStack()
        self._clock = Clock()
        self._logged = (0, 0.0)  # samples and seconds at the last log interval
        self._data_wait = 0.0
        self._ledger: Records | None = None

    def __enter__(self) -> Observer:
        """Start the endpoint: a job that waits for its first step can be watched already."""
        if self.world.local_rank == 0:
            self._endpoint.open(self._closing)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close everything that was opened."""
        self._closing.close()

    def alive(self) -> None:
        """Note a sign of progress, of whatever kind; any thread may call this."""
        self._endpoint.alive()

    def begin(
        self,
        run: RunState,
        num_parameters: int,
        shares: BatchShares,
        num_train: int,
        num_validation: int,
    ) -> None:
        """Open the files at ``run``'s step: earlier lines are kept, later ones are dropped.

        ``num_train`` and ``num_validation`` are the samples of the two data sets.
        """
        self._num_validation = num_validation
        self._clock = Clock(run.train_seconds)
        self._logged = (run.samples, run.train_seconds)
        self.metrics.step.set(run.step)
        self.metrics.samples.set(run.samples)
        self.metrics.checkpoint_step.set(run.step)
        self.progress.update(trainSecondsBefore=run.train_seconds)
        if run.eval_loss is not None:
            self.metrics.eval_loss.set(run.eval_loss)
        if self.config.logging.ledger:
            self._open_ledger(run.step)
        if not self.world.is_main:
            return
        output, schedule = self.paths.output, self.config.schedule
        self._records = Records(output / METRICS_FILE, run.step)
        self._closing.callback(self._records.close)
        self._log = MLPerfLog.open(
            output / MLPERF_FILE,
            samples=run.samples,
            stdout=not sys.stdout.isatty(),
            facts=self._facts(shares, num_train, num_validation),
        )
        self._closing.callback(self._log.close)
        self._console = Console(schedule.steps, run.step)
        self._closing.callback(self._console.close)
        port = self.progress.read().get("port")
        self._console.say(
            f"{num_parameters:,} parameters · {schedule.global_batch_size} samples a step on "
            f"{self.world.size} × {self.world.device.type}"
            + self._unevenness(shares)
            + (f" · http://{self.paths.metrics_address}:{port}/metrics" if port else "")
            + (f" · resumed after step {run.step}" if run.step else "")
        )

    def ready(self) -> None:
        """Start the clock once every rank is loaded; none comes back, to read samples, before it runs."""
        self.world.barrier()
        self.progress.update(steps=self.config.schedule.steps)
        self._endpoint.enter(RUNNING)
        self._clock.go_on()
        if self.world.is_main:
            self._log.ready()
        self.world.barrier()

    def step_begins(self, step: int) -> None:
        """Open an MLPerf block where none is open."""
        if self.world.is_main:
            self._log.block_start((step - 1) * self.config.schedule.global_batch_size)

    def step_done(self, step: int) -> None:
        """Note that step ``step`` was given to the device."""
        self.metrics.step.set(step)
        self._endpoint.stepped(step=step)
        if self.world.is_main:
            self._console.advance(step)

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Count the time inside as waiting for data."""
        begin = time.perf_counter()
        yield
        waited = time.perf_counter() - begin
        self._data_wait += waited
        self.metrics.data_wait.inc(waited)
        self.alive()

    def faults(self, faults: tuple[str, ...]) -> None:
        """Count unreadable samples and name the first of them on stderr, whichever rank met them."""
        for fault in faults:
            self.num_faults, self.last_fault = self.num_faults + 1, fault
            self.metrics.bad_samples.inc()
            if self.num_faults <= _MAX_FAULTS_TOLD:
                print(f"skipped an unreadable sample: {fault}", file=sys.stderr, flush=True)

    def used(self, step: int, indices: list[int]) -> None:
        """Note which samples of the data set this rank used in ``step``."""
        if self._ledger is not None:
            self._ledger.write({"step": step, "indices": indices})

    def step_facts(self, facts: StepFacts) -> None:
        """Tell of a logged step everywhere."""
        seconds = self._clock.seconds
        used, spent = facts.samples - self._logged[0], seconds - self._logged[1]
        self._logged = (facts.samples, seconds)
        rate = used / spent if spent > 0 else 0.0
        batch = self.config.schedule.global_batch_size
        left = (self.config.schedule.steps - facts.step) * batch / rate if rate else 0.0
        self._set_gauges(facts, rate, left, spent * batch / max(used, 1))
        if not self.world.is_main:
            return
        self._records.write(
            {
                "step": facts.step,
                "samples": facts.samples,
                "train_loss": facts.loss,
                "grad_norm": facts.grad_norm,
                "learning_rate": facts.learning_rate,
                "samples_per_second": rate,
                "seconds": seconds,
                "data_wait_seconds": self._data_wait,
            }
        )
        self._data_wait = 0.0
        self._log.tracked_stats(
            facts.samples,
            {"throughput": rate, "loss": facts.loss, "lr": facts.learning_rate},
        )
        self._console.step_line(
            facts.step, facts.loss, rate, facts.learning_rate, facts.grad_norm, left
        )

    def evaluation_begins(self, run: RunState) -> Callable[[int], None]:
        """Stop the training clock; return what to call with the samples evaluated."""
        self._clock.pause()
        self._endpoint.enter(EVALUATING)
        if not self.world.is_main:
            return lambda samples: self.alive()
        if run.step:
            self._log.block_stop(run.samples)
            self._log.eval_start(run.samples)
        show = self._console.task("evaluate", self._num_validation)

        def advance(samples: int) -> None:
            self.alive()
            show(samples)

        return advance

    def left_out(self, result: Evaluation) -> None:
        """Count the validation samples that ``result`` is without, and name the first of them on stderr."""
        self.metrics.eval_loss.set(result.loss)  # before it is judged: an alert asks for NaN
        if not self.world.is_main:
            return
        self.metrics.bad_samples.inc(len(result.faults))
        for fault in result.faults:
            if fault not in self._left_out and len(self._left_out) < _MAX_FAULTS_TOLD:
                self._left_out[fault] = None
                print(f"skipped an unreadable validation sample: {fault}", file=sys.stderr)

    def evaluation_done(self, run: RunState, result: Evaluation) -> None:
        """Tell of the evaluation loss everywhere, and let the training clock go on."""
        for index, loss in enumerate(result.by_timestep):
            if loss is not None:
                self.metrics.eval_loss_by_timestep.labels(f"{index}/8").set(loss)
        self.progress.update(evalLoss=result.loss)
        if self.world.is_main:
            self._records.write(
                {
                    "step": run.step,
                    "samples": run.samples,
                    "eval_loss": result.loss,
                    "eval_loss_by_timestep": result.by_timestep,
                    "eval_samples": result.num_samples,
                }
            )
            if run.step:
                self._log.eval_accuracy(run.samples, result.loss, result.num_samples)
                self._log.eval_stop(run.samples)
            bad = len(result.faults)
            self._console.say(
                f"evaluation at step {run.step}: loss {result.loss:.5f} on {result.num_samples} samples"
                + (f", {bad} could not be read" if bad else "")
            )
        self._endpoint.enter(RUNNING)
        self._clock.go_on()

    @contextmanager
    def saving(self, run: RunState) -> Iterator[None]:
        """Count the time inside as waiting for a checkpoint."""
        self._clock.pause()
        begin = time.perf_counter()
        with self._endpoint.inside(SAVING):
            yield
        self.metrics.checkpoint_stall.inc(time.perf_counter() - begin)
        self.progress.update(trainSeconds=run.train_seconds)
        self._clock.go_on()

    def saved(self, step: int) -> None:
        """Note that the checkpoint of ``step`` is complete; any thread may call this."""
        self.metrics.checkpoint_step.set(step)
        self.progress.update(checkpointStep=step, checkpointTime=time.time())

    @contextmanager
    def sampling(self, step: int) -> Iterator[Path]:
        """Stop the training clock inside; yield the file that the sample images of ``step`` belong in."""
        self._clock.pause()
        path = self.paths.output / SAMPLES_FOLDER / f"step_{step:07d}.png"
        with self._endpoint.inside(SAMPLING):
            yield path
        if self.world.is_main:
            self._console.say(f"sample images at step {step}: {path}")
        self._clock.go_on()

    def over(self, run: RunState) -> None:
        """The last step or the target is reached: MLPerf's clock stops, whatever is saved or drawn after."""
        if self.world.is_main:
            self._log.block_stop(run.samples)
            self._log.run_stop(run.status, run.samples)

    def finished(self, run: RunState) -> None:
        """Write the loss curve and the last words."""
        self._endpoint.enter(FINISHING)
        if self.world.is_main:
            self._draw_curve(run)
        self.progress.update(status=run.status)
        self._endpoint.enter(COMPLETE)

    def _draw_curve(self, run: RunState) -> None:
        # a second of imports, spent once at the end
        from fluxtrain.report.curve import save_loss_curve

        records = read_records(self.paths.output / METRICS_FILE)
        save_loss_curve(self.paths.output / LOSS_FILE, records, self.config.evaluation.target_loss)
        self._console.say(
            f"{run.status} at step {run.step}: {run.samples:,} samples in {duration(run.train_seconds)}"
        )

    @property
    def train_seconds(self) -> float:
        """Return the seconds spent training so far, over all resumes."""
        return self._clock.seconds

    def _unevenness(self, shares: BatchShares) -> str:
        """Return what a number of ranks costs that does not divide the work or is not divided itself."""
        ranks, said, asked = self.world.size, "", self.config.parallel.dp_replicate
        if shares.padding:
            said += f" · {shares.padding} padding samples a step"
        if (held := replicas(self.config, ranks)) != asked:
            said += f" · dp_replicate {held}: {asked} does not divide {ranks} ranks"
        return said

    def _facts(self, shares: BatchShares, num_train: int, num_validation: int) -> RunFacts:
        return RunFacts(
            self.config,
            shares,
            train_samples=num_train,
            eval_samples=num_validation,
            started=self.paths.started or time.time(),
            machine=machine_facts(self.world.size, self.world.local_size),
        )

    def _open_ledger(self, step: int) -> None:
        folder = self.paths.output / LEDGER_FOLDER
        folder.mkdir(exist_ok=True)
        if self.world.is_main:  # the files of ranks that there were before, too
            for path in folder.glob("rank_*.jsonl"):
                drop_after(path, step)
        self.world.barrier()
        self._ledger = Records(folder / f"rank_{self.world.rank:05d}.jsonl", step)
        self._closing.callback(self._ledger.close)

    def _set_gauges(self, facts: StepFacts, rate: float, left: float, step_seconds: float) -> None:
        metrics, mfu = self.metrics, self._mfu(rate)
        metrics.samples.set(facts.samples)
        metrics.train_loss.set(facts.loss)
        metrics.grad_norm.set(facts.grad_norm)
        metrics.learning_rate.set(facts.learning_rate)
        metrics.samples_per_second.set(rate)
        metrics.remaining.set(left)
        metrics.step_seconds.observe(step_seconds)
        metrics.memory.set(_memory_bytes(self.world.device))
        if mfu is not None:
            metrics.mfu.set(mfu)
        self.progress.update(
            samples=facts.samples,
            trainLoss=facts.loss,
            samplesPerSecond=rate,
            remainingSeconds=left,
            mfu=mfu,
            trainSeconds=self._clock.seconds,
        )

    def _mfu(self, rate: float) -> float | None:
        """Return the part of the devices' dense peak that ``rate`` samples/s use; None for CPUs."""
        if self.world.device.type != "cuda":
            return None
        peak = peak_flops(torch.cuda.get_device_name(self.world.device))
        if peak is None:
            return None
        config = self.config
        flops = training_flops(config.model, config.image_tokens, config.data.text_length)
        return rate * flops / (peak * self.world.size)


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
