"""The benchmark task: for each setting the largest micro batch, then speed and memory at several batches.

Every trial is a real training in processes of its own. What was measured is not measured again. A
scaling study has the same setting on 1, 2, 4 ... nodes, or on as many ranks of a single node: weak
scaling keeps the batch of a rank, strong scaling the global batch.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import FrameType
from typing import NoReturn

from fluxtrain.benchmark.report import write_report
from fluxtrain.benchmark.results import (
    Measurement,
    Outcome,
    Result,
    Results,
    Status,
    Trial,
    TrialRunner,
    settings,
)
from fluxtrain.contract.process import FINISH, RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.setting import Setting
from fluxtrain.data.sources import open_sources
from fluxtrain.errors import UNSET, ConfigError, FluxtrainError, StoppedError
from fluxtrain.parallel.distributed import World
from fluxtrain.report.endpoint import Endpoint
from fluxtrain.runtime.progress import handled
from fluxtrain.state.random_seed import with_any_seed


def benchmark(config: RunConfig, paths: RunPaths, world: World) -> None:
    """Measure every setting of ``config.benchmark`` on all ranks, and write the results to the output.

    Raises FluxtrainError if nothing could be measured, StoppedError after SIGTERM or SIGINT.
    """
    with ExitStack() as stack:
        endpoint = Endpoint(config, paths, world)
        if world.local_rank == 0:
            endpoint.start(stack)
        stack.enter_context(handled(_stop, signal.SIGTERM, signal.SIGINT))
        runner = TrialRunner(config, paths, world, endpoint)
        if not world.is_main:
            runner.follow()
            return endpoint.set_phase(FINISH)
        results = Results(paths.output, config)

        def on_trial() -> None:
            endpoint.metrics.of_step["step"].set(results.num_trials)
            endpoint.step_done(step=results.num_trials)

        Study(config, world, runner.run, results, on_trial).run()
        runner.dismiss()
        endpoint.set_phase(FINISH)
        print(write_report(config, paths.output, world.size, results.measured), flush=True)
        if not any(result.measurement for result in results.measured):
            raise _nothing(results)
        endpoint.progress.update(status="success")


def _nothing(results: Results) -> FluxtrainError:
    last = results.last
    why = f"nothing could be measured; the last trial, {last.trial}: {last.ending}" if last else ""
    if last is None or last.status != Status.OUT_OF_MEMORY:
        return FluxtrainError(why or "nothing could be measured")
    text = "it needs GPUs, or more memory; examples/benchmark-cpu.yaml has a model for CPUs"
    return ConfigError("spec.run.model", UNSET, f"{why}; {text}")


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    """Stop at once: the process of a trial is killed with this one."""
    raise StoppedError("stopped; what was measured is kept, and the same command resumes")


_GIB = 1 << 30


class Study:
    """The trials of one benchmark, which rank 0 runs one after the other."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        run_trial: Callable[[Trial], Outcome],
        results: Results,
        on_trial: Callable[[], None] = lambda: None,
    ) -> None:
        """Add to ``results``; ``on_trial`` is called after each trial."""
        self._config, self._world = config, world
        self._run_trial, self._results, self._on_trial = run_trial, results, on_trial

    def run(self) -> None:
        """Run all trials that were not run yet."""
        for setting in settings(self._config):
            if given := self._config.benchmark.micro_batch_sizes:
                found = [self._measure(setting, batch) for batch in sorted(set(given))]
            else:
                found = self._search(setting)
            if self._config.benchmark.scaling:
                self._scale(found)

    def _search(self, setting: Setting) -> list[Result]:
        """Search for the largest micro batch; measure it and the powers of two below it."""
        largest = largest_that_fits(
            lambda batch: self._result(self._trial(setting, batch, is_measured=False)).fits,
            self._config.parallel.most_samples,
            self._config.benchmark.largest_micro_batch,
        )
        _print(f"{setting}: the largest micro batch that fits is {largest}")
        found = [self._measure(setting, batch) for batch in powers_up_to(largest)]
        batch = largest
        while found and found[-1].status == Status.OUT_OF_MEMORY and batch > 1:
            batch -= max(1, batch // 8)  # it fits for a few steps only
            found.append(self._measure(setting, batch))
        return found

    def _scale(self, found: Iterable[Result]) -> None:
        """Measure the fastest of ``found`` on fewer ranks, as the config asks for."""
        best = max(found, key=_rate, default=None)
        if best is None or best.measurement is None:
            return
        counts = rank_counts(self._world.num_nodes, self._world.local_size)
        for kind in self._config.benchmark.scaling:
            for count in counts:
                batch = self._config.schedule.global_batch_size
                is_weak = kind == "weak"
                trial = weak(best.trial, count) if is_weak else strong(best.trial, count, batch)
                self._result(trial)

    def _measure(self, setting: Setting, batch: int) -> Result:
        return self._result(self._trial(setting, batch, is_measured=True))

    def _trial(self, setting: Setting, batch: int, is_measured: bool) -> Trial:
        count = self._world.size
        return Trial(setting, batch, count, batch * count, is_measured)

    def _result(self, trial: Trial) -> Result:
        """Return how ``trial`` ended; it is run unless it was before."""
        known = self._results.get(trial)
        if known is not None:
            return known
        outcome = self._run_trial(trial)
        measured = None
        if trial.is_measured and outcome.status == Status.DONE:
            measured = Measurement.of(outcome, trial.num_ranks)
        result = Result(trial, outcome.status, outcome.reason, measured)
        self._results.add(result)
        self._on_trial()
        _print(f"{trial}: {_text(result)}")
        return result


def _rate(result: Result) -> float:
    return result.measurement.images_per_second_per_gpu if result.measurement else 0.0


def _text(result: Result) -> str:
    measured = result.measurement
    if measured is None:
        return result.ending
    rate, mfu = measured.images_per_second_per_gpu, measured.mfu
    return (
        f"{rate:.4g} images/s per rank ({measured.slowest:.4g} to {measured.fastest:.4g}), "
        f"{measured.tflops_per_gpu:.3g} TFLOP/s{'' if mfu is None else f', MFU {mfu:.1%}'}, "
        f"{measured.memory_allocated_bytes / _GIB:.1f} GiB"
    )


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def largest_that_fits(fits: Callable[[int], bool], first: int, most: int) -> int:
    """Return the largest batch from 1 to ``most`` that ``fits``; 0 if there is none.

    The first try is ``first``. A batch is expected to fit if a larger one does.
    """
    below, above, batch = 0, most + 1, min(first, most)
    while above - below > 1:
        below, above = (batch, above) if fits(batch) else (below, batch)
        batch = min(2 * below, most) if above > most else (below + above) // 2
    return below


def powers_up_to(largest: int) -> list[int]:
    """Return the powers of two below ``largest``, and ``largest``; nothing if it is 0."""
    powers = [1 << exponent for exponent in range(largest.bit_length()) if 1 << exponent < largest]
    return [*powers, largest] if largest else []


def check_benchmark(config: RunConfig, paths: RunPaths) -> None:
    """Raise ConfigError or DataError if a trial could not start, or the output is of another benchmark."""
    config = with_any_seed(config)
    Results(paths.output, config)
    if config.data.source == "synthetic":
        return
    for setting in settings(config):
        open_sources(Trial(setting, 1, 1, 1, is_measured=False).config(config), paths.data)


def rank_counts(num_nodes: int, local_size: int) -> list[int]:
    """Return the numbers of ranks of a study: powers of two of nodes, or of ranks of one node, and all."""
    if num_nodes > 1:
        return [nodes * local_size for nodes in powers_up_to(num_nodes)]
    return powers_up_to(local_size)


def weak(trial: Trial, num_ranks: int) -> Trial:
    """Return ``trial`` on ``num_ranks``, with the same batch per rank."""
    batch = trial.micro_batch_size
    return Trial(trial.setting, batch, num_ranks, batch * num_ranks, is_measured=True)


def strong(trial: Trial, num_ranks: int, global_batch_size: int) -> Trial:
    """Return a trial on ``num_ranks`` that divides ``global_batch_size``, in micro batches up to the same."""
    share = -(-global_batch_size // num_ranks)
    batch = min(trial.micro_batch_size, share)
    return Trial(trial.setting, batch, num_ranks, global_batch_size, is_measured=True)
