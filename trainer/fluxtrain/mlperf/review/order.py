"""Rules on the order and the times of a run's events: one run, on a clock that is never stopped."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from fluxtrain.contract.run.presets import MLPERF_TARGET_LOSS
from fluxtrain.mlperf.evidence import Run, num_ranks
from fluxtrain.mlperf.facts import DIVISION_KEY
from fluxtrain.mlperf.lines import LogLine
from fluxtrain.mlperf.review.rule import Rule, rule

RUN_RESULTS = "11"
_REPEAT = "Repeat the run; the log of another cannot be mended."
_ORIGINAL = (
    "Give the original log of one run; fluxtrain writes it to mlperf.log beside the checkpoints."
)
_TRAINING = ("block_start", "block_stop", "eval_start", "eval_stop", "eval_accuracy", "run_start")
"""Events of training; statistics may come after the end of a run."""
_FIRST_MS = 1_000_000_000_000
"""In 2001: no log is older."""
_TOLERANCE_MS = 1000
"""Writers of one log may be this far apart: each node writes when it has flushed its caches."""


@rule("readable-lines", "", _ORIGINAL)
def readable_lines(run: Run) -> Iterator[str]:
    """Every line with the token is an event."""
    for line in run.lines:
        if line.fault:
            yield f"line {line.number} is no event ({line.fault})"


@rule("one-run-per-log", RUN_RESULTS, _ORIGINAL)
def one_run_per_log(run: Run) -> Iterator[str]:
    """A log has one start, one end of initialisation and one end."""
    for key in ("init_stop", "run_start", "run_stop"):
        found = run.all(key)
        if len(found) != 1:
            places = ", ".join(str(line.number) for line in found) or "none"
            yield f"{key} occurs {len(found)} times (lines: {places}), allowed: once"


@rule("order-of-events", RUN_RESULTS, _ORIGINAL)
def order_of_events(run: Run) -> Iterator[str]:
    """init_start, init_stop, run_start, training, run_stop."""
    order = [run.first(key) for key in ("init_start", "init_stop", "run_start", "run_stop")]
    present = [line for line in order if line is not None]
    for earlier, later in pairwise(present):
        if earlier.number > later.number:
            yield f"{earlier.place} is after {later.place}"


@rule("data-before-the-clock", RUN_RESULTS, "The clock starts before any data is touched.")
def data_before_the_clock(run: Run) -> Iterator[str]:
    """Nothing is trained or evaluated before run_start."""
    start = run.first("run_start")
    for line in run.all(*_TRAINING[:-1]):
        if start is not None and line.number < start.number:
            yield f"{line.place} is before run_start (line {start.number})"
            return


@rule("nothing-after-the-end", RUN_RESULTS, _ORIGINAL)
def nothing_after_the_end(run: Run) -> Iterator[str]:
    """No training or evaluation after run_stop."""
    stop = run.first("run_stop")
    for line in run.all(*_TRAINING):
        if stop is not None and line.number > stop.number:
            yield f"{line.place} is after {stop.place}"
            return


@rule(
    "clock-goes-forward", RUN_RESULTS, "Keep the nodes' clocks in step (NTP, slewing). " + _REPEAT
)
def clock_goes_forward(run: Run) -> Iterator[str]:
    """Each event has a time, and none is more than a second before the one above it."""
    for line in run.events:
        if line.fields["time_ms"] < _FIRST_MS:
            time = line.fields["time_ms"]
            yield f"{line.place} is at {time:g}, which is no time in milliseconds since 1970"
            return
    for earlier, later in pairwise(run.events):
        back = earlier.fields["time_ms"] - later.fields["time_ms"]
        if back > _TOLERANCE_MS:
            yield f"{later.place} is {back / 1000:,.1f} s before the event above it ({earlier.place})"


@rule("no-gap-before-the-clock", RUN_RESULTS, _REPEAT)
def no_gap_before_the_clock(run: Run) -> Iterator[str]:
    """The time between init_stop and run_start would count nowhere."""
    stop, start = run.first("init_stop"), run.first("run_start")
    if stop is None or start is None:
        return
    gap = start.fields["time_ms"] - stop.fields["time_ms"]
    if gap > _TOLERANCE_MS:
        yield (
            f"run_start is {gap / 1000:,.1f} s after init_stop: this time is in neither the "
            "initialisation nor the run"
        )


@rule("stops-at-the-target", RUN_RESULTS, _REPEAT, closed_only=True)
def stops_at_the_target(run: Run) -> Iterator[str]:
    """The first evaluation that reaches the target is the last one."""
    for number, line in enumerate(evaluations := run.all("eval_accuracy")):
        if _reaches(line) and number + 1 < len(evaluations):
            after = len(evaluations) - number - 1
            yield (
                f"{line.place} is {line.value:.5g}, which reaches {MLPERF_TARGET_LOSS}, but the run went on: "
                f"{after} more evaluations"
            )
            return


@rule("status-is-true", RUN_RESULTS, _ORIGINAL, closed_only=True)
def status_is_true(run: Run) -> Iterator[str]:
    """``success`` means that the last evaluation reached the target, ``aborted`` that it did not."""
    stop, evaluations = run.first("run_stop"), run.all("eval_accuracy")
    if stop is None:
        return
    status = stop.fields["metadata"].get("status")
    reached = bool(evaluations) and _reaches(evaluations[-1])
    if status not in ("success", "aborted"):
        yield f"{stop.place} has the status {status!r}; allowed: success, aborted"
    elif (status == "success") != reached:
        last = f"{evaluations[-1].value!r}" if evaluations else "none"
        yield (
            f"{stop.place} says {status}, but the last evaluation is {last} "
            f"(target: {MLPERF_TARGET_LOSS})"
        )


@rule("blocks-are-whole", RUN_RESULTS, _ORIGINAL)
def blocks_are_whole(run: Run) -> Iterator[str]:
    """Blocks of training, and evaluations, have a start and a stop each."""
    for kind in ("block", "eval"):
        open_line: LogLine | None = None
        for line in run.all(f"{kind}_start", f"{kind}_stop"):
            starts = line.key.endswith("_start")
            if starts == (open_line is not None):
                yield f"{line.place} has no {kind}_{'stop' if starts else 'start'} before it"
            open_line = line if starts else None
        if open_line is not None and run.first("run_stop") is not None:
            yield f"{open_line.place} has no {kind}_stop"


@rule(
    "not-resumed",
    RUN_RESULTS,
    "Give a run that was not interrupted: the rules leave open whether a resumed run counts.",
    closed_only=True,
)
def not_resumed(run: Run) -> Iterator[str]:
    """The run was not interrupted."""
    for line in run.all("run_resumed"):
        same = line.value.get("same_nodes") if isinstance(line.value, dict) else None
        where = "" if same is None else f" on {'the same' if same else 'other'} nodes"
        yield f"the run was resumed after {line.samples} samples{where} (line {line.number})"


@rule(
    "resumed-on-the-same-ranks",
    "2.2",
    "Repeat the run on a fixed number of nodes.",
    closed_only=True,
)
def resumed_on_the_same_ranks(run: Run) -> Iterator[str]:
    """The system of a run does not change."""
    counts = [line.value.get("num_ranks") for line in run.all("run_resumed") if _is_ranks(line)]
    first = num_ranks(run.system)
    if first and counts:
        counts.insert(0, first)
    if len(set(counts)) > 1:
        yield f"the run went on with another number of ranks: {', '.join(map(str, counts))}"


@rule(
    "stays-closed",
    "2.2",
    "Repeat the run, with logging.mlperf.division: open if it is to be submitted there: the head of a log "
    "is not changed.",
    closed_only=True,
)
def stays_closed(run: Run) -> Iterator[str]:
    """No rule of the closed division was broken after the start."""
    head = run.first("submission_division")
    for line in run.all(DIVISION_KEY):
        rules = line.value.get("rules") if isinstance(line.value, dict) else None
        told = "; ".join(map(str, rules)) if isinstance(rules, list) else repr(rules)
        after = "" if line.samples is None else f" after {line.samples:,} samples"
        yield (
            f"{head.place if head else 'the log'} says closed, but the run left the closed division{after}, "
            f"by {line.place}: {told}"
        )


RULES: tuple[Rule[Run], ...] = (
    stays_closed,
    readable_lines,
    one_run_per_log,
    order_of_events,
    data_before_the_clock,
    nothing_after_the_end,
    clock_goes_forward,
    no_gap_before_the_clock,
    stops_at_the_target,
    status_is_true,
    blocks_are_whole,
    not_resumed,
    resumed_on_the_same_ranks,
)


def _reaches(line: LogLine) -> bool:
    value = line.value
    return isinstance(value, int | float) and 0 < value <= MLPERF_TARGET_LOSS


def _is_ranks(line: LogLine) -> bool:
    return isinstance(line.value, dict) and isinstance(line.value.get("num_ranks"), int)
