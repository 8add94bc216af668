"""Where a run will reach its target, and where MLCommons' reference runs reach MLPerf's."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fluxtrain.contract.run.closed_division import PREFIX
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.presets import MLPERF_TARGET_LOSS
from fluxtrain.mlperf import RULESETS
from fluxtrain.mlperf.campaign.forecast import Evaluation, samples_to_target
from fluxtrain.mlperf.rcp import reference_point
from fluxtrain.progress import Progress
from fluxtrain.report.metrics import Metrics
from fluxtrain.report.records import Record


class Convergence:
    """Forecasts the samples to the target after each evaluation; on rank 0."""

    def __init__(
        self, config: RunConfig, records: Sequence[Record], metrics: Metrics, progress: Progress
    ) -> None:
        """Continue with the evaluations among ``records``; report to ``metrics`` and ``progress``."""
        self._target = config.evaluation.target_loss
        self._every = config.evaluation_steps * config.schedule.global_batch_size
        self._metrics, self._progress = metrics, progress
        self._evaluations: list[Evaluation] = [
            (record["samples"], record["eval_loss"]) for record in records if "eval_loss" in record
        ]
        if (band := reference_band(config)) is not None:
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


def reference_band(config: RunConfig) -> tuple[float, float] | None:
    """Return the samples between which the reference's runs reach the target of a benchmark run.

    None for runs of other presets or targets, and above the largest batch size of the reference.
    """
    is_benchmark = config.preset.startswith(PREFIX) and config.task == "train"
    if not is_benchmark or config.evaluation.target_loss != MLPERF_TARGET_LOSS:
        return None
    point = reference_point(config.schedule.global_batch_size, RULESETS[-1])
    return None if point is None else point.band
