"""The benchmark task: for each setting the largest micro batch, then speed and memory at several batches.

Every trial is a real training in processes of its own (crew.py). What was measured is not measured again.
"""

from __future__ import annotations

import signal
import sys
from contextlib import ExitStack
from types import FrameType
from typing import NoReturn

from fluxtrain.benchmark.crew import Crew
from fluxtrain.benchmark.process import Status
from fluxtrain.benchmark.results import CSV_FILE, JSON_FILE, Measurement, Result, Results
from fluxtrain.benchmark.search import batches_up_to, largest_that_fits
from fluxtrain.benchmark.setting import Setting, Trial, settings
from fluxtrain.benchmark.table import render
from fluxtrain.contract.launch import RunPaths
from fluxtrain.contract.progress import FINISH
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.distributed import World
from fluxtrain.errors import FluxtrainError, StoppedError
from fluxtrain.report.endpoint import Endpoint
from fluxtrain.signals import handled


def benchmark(config: RunConfig, paths: RunPaths, world: World) -> None:
    """Measure every setting of ``config.benchmark`` on all ranks, and write the results to the output.

    Raises FluxtrainError if no setting could be measured, StoppedError after SIGTERM or SIGINT.
    """
    with ExitStack() as stack:
        endpoint = Endpoint(config, paths, world)
        if world.local_rank == 0:
            endpoint.start(stack)
        stack.enter_context(handled(_stop, signal.SIGTERM, signal.SIGINT))
        crew = Crew(config, paths, world, endpoint)
        if not world.is_main:
            crew.follow()
            return endpoint.set_phase(FINISH)
        study = Study(config, paths, world, crew, endpoint)
        study.run()
        crew.dismiss()
        endpoint.set_phase(FINISH)
        study.report()
        endpoint.progress.update(status="success")


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    """Stop at once: the process of a trial is killed with this one."""
    raise StoppedError("stopped; what was measured is kept, and the same command goes on")


class Study:
    """The trials of one benchmark, on rank 0."""

    def __init__(
        self, config: RunConfig, paths: RunPaths, world: World, crew: Crew, endpoint: Endpoint
    ) -> None:
        """Continue with the results in the output; raises ConfigError if they are of another config."""
        self._config, self._world, self._paths = config, world, paths
        self._crew, self._endpoint = crew, endpoint
        self._results = Results(paths.output, config)

    def run(self) -> None:
        """Run all trials that were not run yet."""
        for setting in settings(self._config):
            if given := self._config.benchmark.micro_batch_sizes:
                for batch in sorted(set(given)):
                    self._trial(setting, batch, is_measured=True)
            else:
                self._measure_up_to_largest(setting)

    def report(self) -> None:
        """Print the table of all measurements; FluxtrainError if there is none."""
        print(render([result.row() for result in self._results.measured]), flush=True)
        print(f"{self._paths.output}: {CSV_FILE}, {JSON_FILE}", flush=True)
        if not any(result.measurement for result in self._results.measured):
            raise FluxtrainError("nothing could be measured: see the reasons above")

    def _measure_up_to_largest(self, setting: Setting) -> None:
        """Search for the largest micro batch; measure it and the powers of two below it."""
        largest = largest_that_fits(
            lambda batch: self._trial(setting, batch, is_measured=False).fits,
            self._config.parallel.micro_batch_size,
            self._config.benchmark.largest_micro_batch,
        )
        self._print(f"{setting}: the largest micro batch that fits is {largest}")
        for batch in batches_up_to(largest):
            result = self._trial(setting, batch, is_measured=True)
        while largest and not result.fits and batch > 1:  # it fits for a few steps only
            batch -= max(1, batch // 8)
            result = self._trial(setting, batch, is_measured=True)

    def _trial(self, setting: Setting, batch: int, is_measured: bool) -> Result:
        """Return how the trial ended; it is run unless it was before."""
        trial = Trial(setting, batch, self._world.size, is_measured)
        known = self._results.get(trial)
        if known is not None:
            return known
        outcome = self._crew.run(trial)
        measured = None
        if is_measured and outcome.status == Status.DONE:
            measured = Measurement.of(outcome, trial.num_ranks)
        result = Result(trial, outcome.status, outcome.reason, measured)
        self._results.add(result)
        self._endpoint.metrics.step.set(self._results.num_trials)
        self._endpoint.step_done(step=self._results.num_trials)
        self._print(f"{trial}: {_text(result)}")
        return result

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def _text(result: Result) -> str:
    measured = result.measurement
    if measured is not None:
        rate, spread = measured.images_per_second_per_gpu, (measured.slowest, measured.fastest)
        mfu = "" if measured.mfu is None else f", MFU {measured.mfu:.1%}"
        return (
            f"{rate:.4g} images/s per GPU ({spread[0]:.4g} to {spread[1]:.4g}), "
            f"{measured.tflops_per_gpu:.3g} TFLOP/s{mfu}, "
            f"{measured.memory_allocated_bytes / (1 << 30):.1f} GiB"
        )
    if result.fits:
        return "fits"
    return f"{result.status.name.lower().replace('_', ' ')}: {result.reason}"
