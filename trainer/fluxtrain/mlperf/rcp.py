"""MLCommons' reference convergence points (RCPs): the number of samples that a submission must need.

The mean of a submission's ten sample counts without the lowest and the highest ("olympic mean") is compared
with twenty reference runs of the same global batch size by a one-sided t-test. A submission that converges
faster is scaled by reference mean / submission mean within the test's margin, and refused below it. The
points are read from the ``mlperf-logging`` wheel; its checker decides.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from math import inf, sqrt
from statistics import pstdev
from typing import Literal

from fluxtrain.contract.run.closed_division import is_benchmark
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.presets import MLPERF_EVALUATION_SAMPLES, MLPERF_TARGET_LOSS
from fluxtrain.mlperf.compliance import RULESETS
from fluxtrain.mlperf.evidence import Run
from fluxtrain.runtime.program import MLPERF_PACKAGE, needs

NUM_RUNS = 10
_COUNTED_RUNS = NUM_RUNS - 2
_REFERENCE_RUNS = 2 * NUM_RUNS

_MEASURED_MARGIN = 1.7108820799094282 * sqrt(1 / (_REFERENCE_RUNS - 2) + 1 / _COUNTED_RUNS)
"""Standard deviations below the mean that pass: Student's t at 95 %, 18 + 8 - 2 degrees of freedom."""
_INTERPOLATED_MARGIN = 1.7056179197592738 * sqrt(1 / _REFERENCE_RUNS + 1 / _COUNTED_RUNS)
"""The same for an interpolated point, whose twenty runs all count: 20 + 8 - 2 degrees of freedom."""

_BAND = 1.959963984540054
"""Standard deviations around the mean with 95 % of a normal distribution."""

Source = Literal["measured", "interpolated", "smallest", "missing"]


@dataclass(frozen=True)
class ReferencePoint:
    """Convergence of the reference at one global batch size, in training samples."""

    global_batch_size: int
    mean: float
    deviation: float
    source: Source = "measured"

    @property
    def minimum(self) -> float:
        """Return the smallest accepted mean of a submission."""
        margin = _INTERPOLATED_MARGIN if self.source == "interpolated" else _MEASURED_MARGIN
        return self.mean - margin * self.deviation

    @property
    def band(self) -> tuple[float, float]:
        """Return the samples between which 95 % of the reference's runs converge, if normally distributed."""
        return self.mean - _BAND * self.deviation, self.mean + _BAND * self.deviation


@dataclass(frozen=True)
class Convergence:
    """Comparison of the olympic mean of ten runs with the reference."""

    accepted: bool
    mean: float  # samples; infinite if two or more runs did not converge
    point: ReferencePoint | None  # None if there is no reference for this batch size
    scaling_factor: float

    @property
    def margin(self) -> float:
        """Return the samples by which the mean is above (or below: negative) the accepted minimum."""
        return self.mean - self.point.minimum if self.point else -inf


def compatible_batch_sizes() -> tuple[int, ...]:
    """Return the global batch sizes with which one log can satisfy every ruleset.

    5.1.0 and 6.0.0 require an evaluation every 262,144 samples exactly, 6.1.0 rounds up to a whole batch:
    only divisors of 262,144 satisfy both.
    """
    return tuple(2**n for n in range(13))


@cache
def reference_points(ruleset: str) -> tuple[ReferencePoint, ...]:
    """Return the measured points of ``ruleset`` that its checker uses, by ascending global batch size."""
    name = f"rcp_checker/training_{ruleset}/rcps_flux1.json"
    records = json.loads(files("mlperf_logging").joinpath(name).read_text(encoding="utf-8"))
    points = [_measured(r["BS"], r["samples to converge"]) for r in records.values()]
    return tuple(_pruned(sorted(points, key=lambda point: point.global_batch_size)))


def reference_point(global_batch_size: int, ruleset: str) -> ReferencePoint | None:
    """Return the point that a run is compared with, None above the largest measured batch size.

    Below the smallest measured batch size it is the smallest point.
    """
    points = reference_points(ruleset)
    lower = [point for point in points if point.global_batch_size <= global_batch_size]
    upper = [point for point in points if point.global_batch_size > global_batch_size]
    if lower and lower[-1].global_batch_size == global_batch_size:
        return lower[-1]
    if not upper:
        return None
    if not lower:
        return replace(upper[0], source="smallest")
    return _between(lower[-1], upper[0], global_batch_size)


def reference_band(config: RunConfig) -> tuple[float, float] | None:
    """Return the samples between which the reference's runs reach the target of a benchmark run.

    None for runs of other presets or targets, and above the largest batch size of the reference.
    """
    if not _has_target(config):
        return None
    point = reference_point(config.schedule.global_batch_size, RULESETS[-1])
    return None if point is None else point.band


def reference_mean(config: RunConfig) -> tuple[float | None, str] | None:
    """Return the mean samples to the target of a benchmark run and their origin, or why there are none.

    None for runs of other presets or targets.
    """
    if not _has_target(config):
        return None
    if find_spec(MLPERF_PACKAGE) is None:
        return None, needs(MLPERF_PACKAGE, "mlperf")
    point = reference_point(config.schedule.global_batch_size, RULESETS[-1])
    return (None, _no_point(RULESETS[-1])) if point is None else (point.mean, _origin(point))


def _has_target(config: RunConfig) -> bool:
    return is_benchmark(config) and config.evaluation.target_loss == MLPERF_TARGET_LOSS


def compare_with_reference(
    samples: Sequence[float | None], global_batch_size: int, ruleset: str
) -> Convergence:
    """Compare the runs' ``samples`` to convergence with the reference; None: did not converge."""
    mean = _olympic_mean([inf if count is None else count for count in samples])
    point = reference_point(global_batch_size, ruleset)
    if point is None or mean == inf:
        return Convergence(False, mean, point, 1.0)
    return Convergence(mean >= point.minimum, mean, point, max(1.0, point.mean / mean))


def score(minutes: Sequence[float], scaling_factor: float) -> float:
    """Return a result's score in minutes: the mean without the fastest and the slowest run, scaled."""
    return _olympic_mean(minutes) * scaling_factor


def _olympic_mean(values: Sequence[float]) -> float:
    """Return the mean without the lowest and the highest of ``values``."""
    kept = sorted(values)[1:-1]
    return sum(kept) / len(kept)


def describe_targets(global_batch_size: int, rulesets: Sequence[str]) -> list[str]:
    """Return the convergence that a closed run at this global batch size needs, one line per ruleset."""
    lines = []
    for ruleset in rulesets:
        point = reference_point(global_batch_size, ruleset)
        if point is None:
            lines.append(f"{ruleset}: {_no_point(ruleset)}")
            continue
        evaluations = round(point.mean / MLPERF_EVALUATION_SAMPLES)
        lines.append(
            f"{ruleset}: the reference needs {point.mean:,.0f} samples, {evaluations} evaluations "
            f"({_origin(point)}); accepted from a mean of {point.minimum:,.0f}"
        )
    if global_batch_size not in (sizes := compatible_batch_sizes()):
        listed = ", ".join(str(size) for size in sizes if size >= 512)
        lines.append(
            f"no single log at global batch size {global_batch_size} satisfies all rulesets, as it does not "
            f"divide {MLPERF_EVALUATION_SAMPLES:,}; {listed} and smaller powers of two do"
        )
    return lines


def explain(result: Convergence, global_batch_size: int, ruleset: str) -> str:
    """Describe the comparison: the mean, the accepted minimum, the margin, the scaling factor."""
    point = result.point
    if result.mean == inf:
        return "refused: two or more runs did not converge; at most one may be dropped"
    if point is None:
        return (
            f"refused: {_no_point(ruleset)}; "
            f"{global_batch_size} needs twenty reference runs of your own"
        )
    against = f"{point.mean:,.0f} samples ({_origin(point)}, ruleset {ruleset})"
    mean = f"mean of {_COUNTED_RUNS} runs {result.mean:,.0f} samples"
    if not result.accepted:
        return (
            f"refused: {mean}, {-result.margin:,.0f} below the accepted minimum of "
            f"{point.minimum:,.0f}; the reference needs {against}. Faster convergence than the reference's "
            "indicates a difference from it: learning rate, data order, evaluation"
        )
    if result.scaling_factor > 1:
        return (
            f"accepted: {mean}, {result.margin:,.0f} above the accepted minimum of {point.minimum:,.0f}; "
            f"faster than the reference's {against}, so the score is multiplied by "
            f"{result.scaling_factor:.4f}"
        )
    return f"accepted: {mean}, not faster than the reference's {against}; no scaling"


def _no_point(ruleset: str) -> str:
    return f"no reference above global batch size {reference_points(ruleset)[-1].global_batch_size}"


def _origin(point: ReferencePoint) -> str:
    size = point.global_batch_size
    texts: dict[Source, str] = {
        "measured": f"measured at global batch size {size}",
        "interpolated": f"interpolated for global batch size {size}",
        "smallest": f"of the smallest measured global batch size, {size}",
    }
    return texts[point.source]


def _measured(global_batch_size: int, samples: Sequence[float]) -> ReferencePoint:
    """Return the mean without the extremes and the population deviation of all, as the checker does."""
    return ReferencePoint(global_batch_size, _olympic_mean(samples), pstdev(samples))


def _between(low: ReferencePoint, high: ReferencePoint, size: int) -> ReferencePoint:
    part = (size - low.global_batch_size) / (high.global_batch_size - low.global_batch_size)
    mean = low.mean + part * (high.mean - low.mean)
    deviation = low.deviation + part * (high.deviation - low.deviation)
    return ReferencePoint(size, mean, deviation, "interpolated")


def _pruned(points: list[ReferencePoint]) -> list[ReferencePoint]:
    """Remove points below the fastest one's batch size, then those above the line of their neighbours."""
    fastest = min(points, key=lambda point: point.mean).global_batch_size
    kept = [point for point in points if point.global_batch_size >= fastest]
    i = 1
    while i < len(kept) - 1:
        chord = _between(kept[i - 1], kept[i + 1], kept[i].global_batch_size)
        if kept[i].mean > chord.mean:
            del kept[i]  # the checker does not check earlier points again
        else:
            i += 1
    return kept


def median_window(runs: Sequence[Run]) -> list[Run]:
    """Return the ten consecutive runs, by their start, whose score is the median of all such windows.

    MLCommons' rules allow more runs than a result has, but not a choice among them. Of two medians it is the
    slower; a window in which two runs did not converge is the slowest.
    """
    ordered = sorted(runs, key=_window_start)
    starts = range(max(1, len(ordered) - NUM_RUNS + 1))
    windows = [ordered[start : start + NUM_RUNS] for start in starts]
    ranked = sorted(windows, key=lambda window: score([run.minutes for run in window], 1.0))
    return ranked[len(ranked) // 2]


def _window_start(run: Run) -> float:
    """Return the time of run_start in milliseconds; runs without one come last."""
    line = run.first("run_start")
    return inf if line is None else float(line.fields["time_ms"])
