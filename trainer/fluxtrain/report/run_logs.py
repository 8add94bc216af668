"""The logs that rank 0 writes: metrics.jsonl, the MLPerf log, the loss curve and the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from fluxtrain.contract.process import (
    LEDGER_FOLDER,
    LOSS_FILE,
    METRICS_FILE,
    RunPaths,
)
from fluxtrain.contract.run.closed_division import Violation, violations
from fluxtrain.contract.run.config import RunConfig, Sharding
from fluxtrain.data.loader import AnyOrder
from fluxtrain.data.order import BatchShares
from fluxtrain.data.sources import Sources
from fluxtrain.parallel.compile import attention_on
from fluxtrain.parallel.distributed import World
from fluxtrain.parallel.traffic import sent_by_node
from fluxtrain.report.console import Console, duration
from fluxtrain.report.gallery import RunPage
from fluxtrain.report.metrics import STEP_METRICS, LoggedStep, Metrics
from fluxtrain.report.records import (
    Evaluation,
    EvaluationPoint,
    Record,
    Records,
    RunLog,
    drop_after,
    read_records,
    samples_to_target,
)
from fluxtrain.report.sinks import open_sinks
from fluxtrain.runtime.devices import Peak
from fluxtrain.runtime.progress import Progress, counted
from fluxtrain.state.run_state import Fence, RunState


class RunLogs:
    """The logs of one run on rank 0, continued after a resume."""

    def __init__(
        self,
        config: RunConfig,
        shares: BatchShares,
        paths: RunPaths,
        run: RunState,
        closing: ExitStack,
        fence: Fence,
        mlperf: RunLog,
    ) -> None:
        """Open all logs but ``mlperf`` until ``closing`` is closed: lines after ``run.step`` are dropped."""
        self._config, self._shares, self._paths, self.mlperf = config, shares, paths, mlperf
        self._num_validation = 0
        self._records = Records(paths.output / METRICS_FILE, run.step)
        closing.callback(self._records.close)
        self.console = Console(config.schedule.steps, run.step)
        closing.callback(self.console.close)
        report = self.console.print_line
        self.page = RunPage(config, paths.output, fence)
        self._sinks = open_sinks(config, paths.output, run, report, self.page)
        for sink in self._sinks:
            closing.callback(sink.close)

    def print_summary(
        self,
        run: RunState,
        world: World,
        parameters: str,
        port: int | None,
        peak: Peak | None,
    ) -> None:
        """Print the size of the run on one line; MFU is a fraction of ``peak``."""
        self.page.hardware = f"{world.size} × {world.device.type}"
        self.console.print_line(
            f"{parameters} · {counted(self._shares.global_batch_size, 'sample')} a step on "
            f"{world.size} × {world.device.type}"
            + _division(self._config, self._shares, world)
            + f" · attention: {attention_on(world.device, self._config)}"
            + (f" · http://{self._paths.metrics_address}:{port}" if port else "")
            + (f" · MFU of {peak}" if peak else "")
            + (f" · resumed after step {run.step}" if run.step else "")
        )
        if self._config.logging.mlperf.division == "auto":
            broken = violations(self._config, self._paths.num_nodes)
            text = "; ".join(map(str, broken)) or "no rule is broken so far"
            division = "open" if broken else "closed"
            self.console.print_line(f"{division} division of MLPerf Training, flux1: {text}")

    def on_rule_broken(self, violation: Violation, run: RunState) -> None:
        """Log and print that ``run`` breaks a rule of the closed division."""
        if self.mlperf.rule_broken(violation, run.samples):
            self.console.print_line(f"no longer of MLPerf's closed division: {violation}")

    def on_data_opened(self, sources: Sources, order: AnyOrder) -> None:
        """Log the sizes and the digests of the data sets; ``order`` is that of the training samples."""
        num_train, self._num_validation = sources.lengths
        self.page.attribution, self.page.order = sources.attribution, order
        if self._config.schedule.epochs is not None or self._config.data.images is not None:
            self.console.epochs = order.epochs
        self.mlperf.data_opened(num_train, self._num_validation, sources.digests)

    def log_step(self, step: LoggedStep) -> None:
        self._write({m.name: getattr(step, m.name) for m in STEP_METRICS if m.is_recorded})
        rate, loss, lr = step.samples_per_second, step.train_loss, step.learning_rate
        self.mlperf.tracked_stats(step.samples, {"throughput": rate, "loss": loss, "lr": lr})
        self.console.step_line(step)

    def on_evaluate_begin(self, run: RunState) -> Callable[[int], None]:
        """Return the progress bar's function, called with the number of samples evaluated."""
        if run.step:
            self.mlperf.eval_start(run.samples)
        return self.console.task("evaluate", self._num_validation)

    def on_evaluate_end(self, run: RunState, result: Evaluation) -> None:
        self._write(
            {
                "step": run.step,
                "samples": run.samples,
                "eval_loss": result.loss,
                "eval_loss_by_timestep": result.by_timestep,
                "eval_samples": result.num_samples,
            }
        )
        if run.step:
            self.mlperf.eval_accuracy(run.samples, result.loss, result.num_samples)
            self.mlperf.eval_stop(run.samples)
        num_bad = len(result.faults)
        self.console.print_line(
            f"evaluation at step {run.step}: loss {result.loss:.5f} on {result.num_samples} samples"
            + (f", {num_bad} could not be read" if num_bad else "")
        )

    def on_sampled(self, step: int, path: Path) -> None:
        """Print where the sample images are."""
        samples = step * self._config.schedule.global_batch_size
        for sink in self._sinks:
            sink.put(samples, path)
        self.console.print_line(f"sample images at step {step}: {path}")

    def _write(self, record: Record) -> None:
        self._records.write(record)
        for sink in self._sinks:
            sink.put(record["samples"], record)

    def on_train_end(self, run: RunState) -> None:
        """Draw the loss curve and print the result."""
        # a second of imports, spent once at the end
        from fluxtrain.report.curve import save_loss_curve

        output = self._paths.output
        self.page.status = run.status
        target = self._config.evaluation.target_loss
        records = read_records(output / METRICS_FILE)
        save_loss_curve(output / LOSS_FILE, records, target, self.mlperf.band)
        self.console.print_line(
            f"{run.status} at step {run.step}: {counted(run.samples, 'sample')} in "
            f"{duration(run.train_seconds)}"
        )


def _division(config: RunConfig, shares: BatchShares, world: World) -> str:
    """Return what the number of ranks costs: padding, fewer replicas, shards of other nodes."""
    text, requested = "", config.parallel.dp_replicate
    sharding = Sharding.of(config, world.size, world.local_size)
    if shares.padding:
        text += f" · {shares.padding} padding samples a step"
    if isinstance(requested, int) and sharding.dp_replicate != requested:
        whole = "each is part of one node, or whole nodes"
        text += f" · dp_replicate {sharding.dp_replicate}, not {requested}: {whole}"
    if world.size > 1 and not config.parallel.reshards:
        text += " · weights stay gathered"
    if sharding.crosses_nodes:
        sent = sent_by_node(config, sharding, shares.accumulation_steps) / 1e9
        text += f" · shard groups cross nodes: each node sends {sent:,.3g} GB a step"
    return text


class Convergence:
    """Forecasts the samples to the target after each evaluation; on rank 0."""

    def __init__(
        self,
        config: RunConfig,
        records: Sequence[Record],
        metrics: Metrics,
        progress: Progress,
        band: tuple[float, float] | None,
    ) -> None:
        """Continue with the evaluations among ``records``; report to ``metrics`` and ``progress``.

        ``band`` has the samples between which reference runs reach the target.
        """
        self._target = config.evaluation.target_loss
        self._every = config.evaluation_steps * config.schedule.global_batch_size
        self._metrics, self._progress = metrics, progress
        self._evaluations: list[EvaluationPoint] = [
            (record["samples"], record["eval_loss"]) for record in records if "eval_loss" in record
        ]
        if band is not None:
            metrics.reference_samples_low.set(band[0])
            metrics.reference_samples_high.set(band[1])
        self._report()

    def add(self, samples: int, loss: float) -> None:
        """Report the forecast after an evaluation."""
        self._evaluations.append((samples, loss))
        self._report()

    def _report(self) -> None:
        if self._target is None:
            return
        forecast = samples_to_target(self._evaluations, self._target, self._every)
        self._metrics.target_samples.set(math.nan if forecast is None else forecast)
        self._progress.update(targetSamples=forecast)


class Ledger:
    """The file of this rank."""

    def __init__(self, output: Path, step: int, world: World, fence: Fence) -> None:
        """Continue the ledger in ``output`` after ``step``; every rank must call this.

        Raises FencedError if there is a newer start, whose files would be replaced.
        """
        fence.check()
        folder = output / LEDGER_FOLDER
        folder.mkdir(exist_ok=True)
        if world.is_main:  # including files of ranks that this run no longer has
            for path in folder.glob("rank_*.jsonl"):
                drop_after(path, step)
        world.barrier()
        fence.check()
        self._records = Records(folder / f"rank_{world.rank:05d}.jsonl", step)

    def write(self, step: int, indices: list[int]) -> None:
        """Append the ``indices`` of the samples that were used in ``step``."""
        self._records.write({"step": step, "indices": indices})

    def close(self) -> None:
        self._records.close()
