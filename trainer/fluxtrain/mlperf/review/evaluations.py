"""Rules on the quality measure: when it is evaluated, on what, and that it is a number."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from itertools import islice

from fluxtrain.contract.run.presets import (
    MLPERF_EVALUATION_SAMPLES,
    MLPERF_TARGET_LOSS,
    MLPERF_VALIDATION_SET,
)
from fluxtrain.mlperf.evidence import Run
from fluxtrain.mlperf.lines import LogLine
from fluxtrain.mlperf.review.rule import Rule, rule

QUALITY = "9.4"
_SHOWN = 4


@rule(
    "evaluation-cadence",
    QUALITY,
    f"Set evaluation.every_samples to {MLPERF_EVALUATION_SAMPLES}, evaluation.at_start and at_end to false, "
    "and repeat the run.",
    closed_only=True,
)
def evaluation_cadence(run: Run) -> Iterator[str]:
    """Every 262,144 samples, rounded up to whole batches, and at no other place."""
    every = cadence(run)
    found = [line.samples for line in run.all("eval_accuracy")]
    if every is None or not found:
        return
    last = max((count for count in found if count is not None), default=0)
    kept = {count for count in found if count is not None and count > 0 and count % every == 0}
    if num_missing := max(0, last // every) - len(kept):
        missing = (count for count in range(every, last + 1, every) if count not in kept)
        shown = _listed(islice(missing, _SHOWN), num_missing)
        yield f"evaluations are missing at {shown} samples; one each {every:,} is needed"
    if off := [count for count in found if count not in kept]:
        yield f"evaluations at {_listed(off[:_SHOWN], len(off))} samples are not a multiple of {every:,}"
    if len(set(found)) < len(found) or found != sorted(found, key=lambda count: count or 0):
        yield "the samples of the evaluations do not increase from one to the next"


@rule(
    "evaluation-is-a-number", QUALITY, "Find the fault in the validation data or the model; repeat."
)
def evaluation_is_a_number(run: Run) -> Iterator[str]:
    """Each evaluation has a finite loss above 0."""
    for line in run.all("eval_accuracy", "averaged_validation_loss"):
        value = line.value
        if isinstance(value, bool) or not isinstance(value, int | float):
            yield f"{line.place} is {value!r}, not a number"
        elif not 0 < value <= sys.float_info.max:
            yield f"{line.place} is {value}"


@rule(
    "whole-evaluation-set", QUALITY, "Use the whole of MLCommons' validation set.", closed_only=True
)
def whole_evaluation_set(run: Run) -> Iterator[str]:
    """All 29,696 samples, in every evaluation that says how many it used."""
    stated = [line for line in run.all("eval_samples")]
    counted = [(line, line.value) for line in stated]
    for line in run.all("eval_accuracy"):
        used = line.fields["metadata"].get("eval_samples")
        if used is not None:
            counted.append((line, used))
    for line, count in counted:
        if count != MLPERF_VALIDATION_SET:
            yield f"{line.place} is over {count} samples; needed: {MLPERF_VALIDATION_SET}"


@rule(
    "target-of-the-benchmark",
    QUALITY,
    f"Set evaluation.target_loss to {MLPERF_TARGET_LOSS} and repeat the run.",
    closed_only=True,
)
def target_of_the_benchmark(run: Run) -> Iterator[str]:
    """A stated target is the benchmark's."""
    for line in run.all("target_accuracy"):
        if line.value != MLPERF_TARGET_LOSS:
            yield f"{line.place} is {line.value}; needed: {MLPERF_TARGET_LOSS}"


@rule("evaluation-takes-time", QUALITY, "Give the original log.", closed_only=True)
def evaluation_takes_time(run: Run) -> Iterator[str]:
    """An evaluation of the whole set is not over at once."""
    start: LogLine | None = None
    for line in run.all("eval_start", "eval_accuracy"):
        if line.key == "eval_start":
            start = line
        elif start is not None and line.fields["time_ms"] <= start.fields["time_ms"]:
            yield (
                f"{line.place} has the time of its eval_start: {MLPERF_VALIDATION_SET} "
                "samples were evaluated in no time"
            )
            return


RULES: tuple[Rule[Run], ...] = (
    evaluation_cadence,
    evaluation_is_a_number,
    whole_evaluation_set,
    target_of_the_benchmark,
    evaluation_takes_time,
)


def cadence(run: Run) -> int | None:
    """Return the samples between two evaluations of a closed run, None without a global batch size."""
    batch = run.number("global_batch_size")
    if batch is None or batch < 1:
        return None
    return math.ceil(MLPERF_EVALUATION_SAMPLES / batch) * batch


def _listed(first: Iterable[int | None], total: int) -> str:
    """Return the ``first`` of ``total`` counts, and how many more there are."""
    shown = ", ".join("no" if count is None else f"{count:,}" for count in first)
    return f"{shown} and {total - _SHOWN} more" if total > _SHOWN else shown
