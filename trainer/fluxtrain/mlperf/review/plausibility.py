"""Notes on what no rule forbids and no published log shows: clocks, losses, caches, seeds, names.

"Published" are the 160 logs of `flux1`, of sixteen results, in MLCommons' results of round 5.1. Each limit is
beyond the whole spread of these logs, or of a count that none of them has.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import combinations, pairwise
from math import isfinite
from statistics import mean, median
from typing import Any

from fluxtrain.contract.run.presets import MLPERF_VALIDATION_SET
from fluxtrain.mlperf.evidence import Result, Run, count_of
from fluxtrain.mlperf.log_lines import is_number
from fluxtrain.mlperf.rcp import reference_point
from fluxtrain.mlperf.review.result_rules import (
    SETTINGS,
    SUBMISSION,
    Rule,
    is_unnamed,
    measured,
    rule,
    rules_in,
)
from fluxtrain.mlperf.review.run_rules import QUALITY, RUN_RESULTS, cadence
from fluxtrain.runtime.progress import counted

_ASK = "Ask for the original log and the cause."
_LEAST_MS = 10_000
"""Shorter blocks are not compared: the shortest published one has 15 s."""
_PACE, _STEPS, _MEASURED, _MEASURED_MS = 0.1, 0.25, 0.05, 50
_SLOWEST, _FASTEST, _EQUAL_LOSSES = 2.0, 5.0, 3
_FIRST_LOSSES = (0.668, 0.629, 0.612, 0.602, 0.594)
_LEAST_LAST, _FALL = 10, 0.004
_DEVIATIONS, _DRAWN, _SHOWN = 3.0, 100, 3
_COUNTED = re.compile(r"([0-9]{1,9})x")
_MODEL = re.compile(r"\b(?:GB|MI|B|H|A)[0-9]{2,3}[A-Z]?\b")
_LEAST_DIFFERENCE, _LEAST_EVALUATIONS = 1e-4, 5
_SERIES, _PAUSE = 10, 0.9


@rule(RUN_RESULTS, _ASK, closed_only=True, kind="note")
def blocks_take_their_time(run: Run) -> Iterator[str]:
    """No block takes less than 0.9 of the run's median; published: 0.985 at least."""
    times = _times(run, "block")
    usual = median(times) if times else 0
    fast = [time for time in times if time < (1 - _PACE) * usual]
    if fast and usual >= _LEAST_MS:
        shown = f"{min(fast) / 1000:,.1f} s at least, the median is {usual / 1000:,.1f} s"
        yield f"{len(fast)} of {len(times)} blocks are fast: {shown}"


@rule(RUN_RESULTS, _ASK, closed_only=True, kind="note", needs="validation_time")
def evaluations_are_as_measured(run: Run) -> Iterator[str]:
    """An evaluation takes its own `validation_time`, within 5 % and 50 ms; published: 0.3 % and 3 ms."""
    for number, (time, seconds) in enumerate(_evaluations(run), 1):
        if seconds and abs(time - seconds * 1000) > max(_MEASURED_MS, _MEASURED * seconds * 1000):
            clock = f"{time / 1000:,.3f} s by the log's clock"
            yield f"evaluation {number} took {clock}, {seconds:,.3f} s by its own"
            return


@rule(QUALITY, _ASK, closed_only=True, kind="note")
def evaluations_take_their_time(run: Run) -> Iterator[str]:
    """A second evaluates 2 to 5 times the samples that it trains; published: 2.6 to 3.4."""
    blocks, times = _times(run, "block"), _times(run, "eval")
    samples, every = MLPERF_VALIDATION_SET, cadence(run)
    if not blocks or not times or not every or median(blocks) < _LEAST_MS:
        return
    ratio = samples / max(1, median(times)) / (every / median(blocks))
    if not _SLOWEST <= ratio <= _FASTEST:
        yield f"{samples:,} samples are evaluated {ratio:,.1f} times as fast as others are trained"


@rule(RUN_RESULTS, _ASK, closed_only=True, kind="note")
def clock_is_of_the_steps(run: Run) -> Iterator[str]:
    """A block takes at least 0.75 of the time by the run's own throughput or steps; published: 0.998."""
    blocks, every, batch = _times(run, "block"), cadence(run), run.number("global_batch_size")
    rates = measured(run, "throughput")
    rates += [batch / seconds for seconds in measured(run, "train_step_time") if batch]
    if not blocks or not every or not rates or (usual := median(blocks)) < _LEAST_MS:
        return
    expected = every / median(rates) * 1000
    if usual < (1 - _STEPS) * expected:
        clock = f"{usual / 1000:,.1f} s by the log's clock"
        yield f"a block takes {clock}, {expected / 1000:,.1f} s by the speed that the run measured"


@rule(QUALITY, _ASK, closed_only=True, kind="note")
def losses_change(run: Run) -> Iterator[str]:
    """No three evaluations of a run have the same loss; published: no two."""
    for loss, count in Counter(_losses(run).values()).items():
        if count >= _EQUAL_LOSSES:
            yield f"{count} evaluations have the loss {loss!r}"


@rule(QUALITY, _ASK, closed_only=True, kind="note")
def losses_begin_untrained(run: Run) -> Iterator[str]:
    """The first five losses are at most 0.02 below the lowest published ones of all batch sizes.

    They are at least 0.668, 0.629, 0.612, 0.602 and 0.594: the weights are random at the start. The last
    loss of a run is left to other rules.
    """
    losses, every = list(_losses(run).items())[:-1], cadence(run) or 1
    for number, least in enumerate(_FIRST_LOSSES, 1):
        loss = dict(losses).get(number * every)
        if loss is not None and 0 < loss < least:
            yield f"the loss of evaluation {number} is {loss:.4f}; published: {least + 0.02:.3f} at least"
            return


@rule(QUALITY, _ASK, closed_only=True, kind="note")
def target_is_reached_by_steps(run: Run) -> Iterator[str]:
    """The last loss is at most 0.004 below the lowest one before it; published: 0.002."""
    losses = list(_losses(run).values())
    if run.succeeded and len(losses) >= _LEAST_LAST and 0 < losses[-1] < min(losses[:-1]) - _FALL:
        before = min(losses[:-1])
        yield f"the last loss is {losses[-1]:.4f}, the lowest one before it {before:.4f}"


@rule(QUALITY, _ASK, closed_only=True, kind="note")
def training_losses_are_numbers(run: Run) -> Iterator[str]:
    """No logged training loss is NaN or infinite; published: none."""
    for line in run.all("tracked_stats"):
        loss = line.value.get("train_loss") if isinstance(line.value, dict) else None
        if isinstance(loss, float) and not isfinite(loss):
            yield f"{line.place} has the training loss {loss}"
            return


_ORIGINAL = "Give the original log of one run."


@rule(RUN_RESULTS, _ORIGINAL)
def settings_are_stated_once(run: Run) -> Iterator[str]:
    """No setting of a log has two values: MLCommons' tools differ in which of them they take."""
    for key in (*SUBMISSION, *SETTINGS):
        values = list(dict.fromkeys(repr(line.value) for line in run.all(key)))
        if len(values) > 1:
            yield f"{key} is {' and '.join(values[:_SHOWN])}"


@rule("6.6", _ORIGINAL)
def batch_is_a_count(run: Run) -> Iterator[str]:
    """`global_batch_size` is a whole number from 1, by which samples are counted."""
    for line in run.all("global_batch_size"):
        if type(line.value) is not int or line.value < 1:
            yield f"{line.place} is {line.value!r}; needed: a whole number from 1"


@rule("", "Give the organisation and the platform their names.", kind="note")
def names_are_filled_in(run: Run) -> Iterator[str]:
    """Organisation and platform are no placeholders of a script; published: 90 logs of 160 have them."""
    for line in run.all("submission_org", "submission_platform"):
        if is_unnamed(line.value):
            yield f"{line.key} is {line.value!r}"


_LAST = (losses_change, names_are_filled_in)
RUN_RULES: tuple[Rule[Run], ...] = tuple(sorted(rules_in(globals()), key=_LAST.__contains__))


@rule("6.1", _ASK, closed_only=True, kind="note")
def caches_of_each_node(result: Result) -> Iterator[str]:
    """The runs have as many `cache_clear` as each other, and as nodes; published: one for each node.

    One of a log with the nodes' own reports is of all of them.
    """
    counts = {run.name: len(run.all("cache_clear")) for run in result.runs}
    if not counts:
        return
    nodes = count_of(result.description or {}, "number_of_nodes")
    told = any(run.system for run in result.runs)
    usual = nodes if nodes and not told else Counter(counts.values()).most_common(1)[0][0]
    whose = "the nodes are" if usual == nodes else "others have"
    for count in sorted({*counts.values()} - {usual}):
        names = [name for name, found in counts.items() if found == count]
        shown = f"{counted(len(names), 'log')}, such as {names[0]},"
        yield f"{count} cache_clear in {shown} {whose} {usual}"


@rule("2.2", _ASK, kind="note")
def platform_is_of_the_description(result: Result) -> Iterator[str]:
    """A number and a model in `submission_platform` are those of the description.

    The number is that of the nodes, of all accelerators, or of those of a node. Published: in all logs that
    of the nodes; 30 logs name another model.
    """
    if result.description is None or not result.runs:
        return
    told, platform = result.description, str(result.runs[0].value("submission_platform"))
    nodes, each = (count_of(told, name) for name in ("number_of_nodes", "accelerators_per_node"))
    found = _COUNTED.match(platform)
    if found and nodes and each and int(found[1]) not in (nodes, each, nodes * each):
        yield f"the logs are of {found[1]} of something ({platform}), the description of {nodes} x {each}"
    model = str(told.get("accelerator_model_name"))
    if (named := _MODEL.search(platform)) and _MODEL.search(model) and named[0] not in model:
        yield f"the logs are of {named[0]} ({platform}), the description of {model}"


@rule("13", _ASK, closed_only=True, kind="note")
def runs_need_as_many_samples(result: Result) -> Iterator[str]:
    """No run is 3 standard deviations faster than the mean of the reference's runs; published: 2.25."""
    size = result.runs[0].number("global_batch_size") if result.runs else None
    if size is None or (point := reference_point(size, result.ruleset)) is None:
        return
    least = point.mean - _DEVIATIONS * point.deviation
    if fast := [run for run in result.runs if run.samples is not None and run.samples < least]:
        reached = ", ".join(f"{run.name} after {run.samples:,} samples" for run in fast)
        yield f"the target was reached by {reached}; the reference needs {point.mean:,.0f} in the mean"


@rule("12", _ASK, closed_only=True, kind="note")
def curves_are_of_their_own(result: Result) -> Iterator[str]:
    """The losses of two runs differ by 0.0001 in the mean; published: by 0.00038 at least."""
    curves = [(run.name, _losses(run)) for run in result.runs]
    for (one, first), (other, second) in combinations(curves, 2):
        common = first.keys() & second.keys()
        if len(common) >= _LEAST_EVALUATIONS:
            apart = mean(abs(first[samples] - second[samples]) for samples in common)
            if apart < _LEAST_DIFFERENCE and (apart or len(first) != len(second)):
                yield f"the losses of {one} and {other} differ by {apart:.2g} in the mean"


@rule("2.2", _ASK, closed_only=True, kind="note")
def runs_keep_one_pace(result: Result) -> Iterator[str]:
    """The median block of a run is within 10 % of the runs' median; published: within 1.8 %."""
    paces = {run.name: median(times) for run in result.runs if (times := _times(run, "block"))}
    usual = median(paces.values()) if paces else 0
    for name, pace in paces.items():
        if usual >= _LEAST_MS and abs(pace / usual - 1) > _PACE:
            yield f"a block of {name} takes {pace / 1000:,.1f} s, of the runs {usual / 1000:,.1f} s"


@rule(
    "12",
    "Ask whether runs were left out: all runs are in the record.",
    closed_only=True,
    kind="note",
)
def seeds_have_no_holes(result: Result) -> Iterator[str]:
    """Where seeds count up, none is left out with a pause of a run's length; published: 8 holes have one."""
    spans = [(span, run) for run in result.runs if (span := _span(run)) is not None]
    spans.sort(key=lambda each: each[0])
    steps = [
        (later.number("seed") or 0) - (earlier.number("seed") or 0)
        for (_, earlier), (_, later) in pairwise(spans)
    ]
    length = mean(stop - start for (start, stop), _ in spans) if spans else 0
    holes = list[str]()
    for step, (((_, stop), earlier), ((start, _), later)) in zip(
        steps, pairwise(spans), strict=True
    ):
        pause = (start - stop) / length if length else 0
        if 1 in steps and 1 < step <= _SERIES and pause >= _PAUSE * (step - 1):
            left_out = counted(step - 1, "seed")
            where = f"between {earlier.name} and {later.name}"
            holes.append(f"{left_out} left out {where}, in a pause of {pause:.1f} run lengths")
    if holes:
        yield "; ".join(holes)


@rule("5.1", _ASK, closed_only=True, kind="note")
def seeds_are_drawn(result: Result) -> Iterator[str]:
    """Not all seeds are below 100, as numbers are that nobody has drawn; published: none."""
    seeds = [run.number("seed") for run in result.runs]
    if len(seeds) > 1 and all(seed is not None and 0 <= seed < _DRAWN for seed in seeds):
        yield f"the seeds are {', '.join(map(str, seeds))}"


def _span(run: Run) -> tuple[float, float] | None:
    start, stop = run.first("run_start"), run.first("run_stop")
    if start is None or stop is None:
        return None
    return start.fields["time_ms"], stop.fields["time_ms"]


def _times(run: Run, kind: str) -> list[float]:
    """Return the milliseconds of each block or evaluation; none of a resumed run, whose blocks are parts."""
    lines = [] if run.all("run_resumed") else run.all(f"{kind}_start", f"{kind}_stop")
    return [
        later.fields["time_ms"] - earlier.fields["time_ms"]
        for earlier, later in pairwise(lines)
        if (earlier.key, later.key) == (f"{kind}_start", f"{kind}_stop")
    ]


def _evaluations(run: Run) -> Iterator[tuple[float, float | None]]:
    """Yield the milliseconds of each evaluation, and the seconds that it measured itself, if it did."""
    start: float | None = None
    seconds: float | None = None
    for line in run.all("eval_start", "eval_stop", "tracked_stats"):
        if line.key == "eval_start":
            start, seconds = line.fields["time_ms"], None
        elif line.key == "tracked_stats":
            value: Any = line.value.get("validation_time") if isinstance(line.value, dict) else None
            seconds = float(value) if is_number(value) and value > 0 else seconds
        elif start is not None:
            yield line.fields["time_ms"] - start, seconds
            start = None


def _losses(run: Run) -> Mapping[int, float]:
    """Return the loss of each evaluation that has one, by its samples."""
    return {
        line.samples: line.measured
        for line in run.all("eval_accuracy")
        if line.samples is not None and line.measured is not None and abs(line.measured) < 1e9
    }


RESULT_RULES: tuple[Rule[Result], ...] = rules_in(globals())[len(RUN_RULES) :]
