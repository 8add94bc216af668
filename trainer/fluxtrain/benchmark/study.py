"""Which trials a benchmark consists of: the search, the batches below its result, and the scaling."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from fluxtrain.benchmark.crew import Outcome
from fluxtrain.benchmark.process import Status
from fluxtrain.benchmark.results import Measurement, Result, Results
from fluxtrain.benchmark.scaling import rank_counts, strong, weak
from fluxtrain.benchmark.search import batches_up_to, largest_that_fits
from fluxtrain.benchmark.sweep import Trial, settings
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.distributed import World
from fluxtrain.setting import Setting

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
            self._config.parallel.micro_batch_size,
            self._config.benchmark.largest_micro_batch,
        )
        _print(f"{setting}: the largest micro batch that fits is {largest}")
        found = [self._measure(setting, batch) for batch in batches_up_to(largest)]
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
        """Return the trial of ``batch`` on all ranks."""
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
