"""What `fluxtrain mlperf campaign status` prints: each run, the curve of all, and the verdict so far."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import inf, isfinite
from statistics import pstdev

from fluxtrain.mlperf import rcp
from fluxtrain.mlperf.campaign.observed_runs import ObservedRun
from fluxtrain.mlperf.explain import counted, sanitize
from fluxtrain.mlperf.facts import DIVISION_KEY
from fluxtrain.mlperf.review.window import median_window

_MOST_ROWS = 12
_BAR = 30


def report(runs: Sequence[ObservedRun], ruleset: str) -> str:
    """Return the report on ``runs``, for a terminal."""
    width = max(len(sanitize(run.name)) for run in runs)
    lines = [f"{'RUN':<{width}}  STATE          EVALS     SAMPLES     LOSS    TO TARGET  MINUTES"]
    lines += [_row(run, width) for run in runs]
    lines += ["", *_curve(runs), "", *_verdict(runs, ruleset)]
    return "\n".join(lines)


def _row(run: ObservedRun, width: int) -> str:
    samples, loss = run.evaluations[-1] if run.evaluations else (0, None)
    to_target = "-" if run.forecast is None else f"{'' if run.is_over else '~'}{run.forecast:,}"
    minutes = run.log.minutes if run.log is not None else float("inf")
    return (
        f"{sanitize(run.name):<{width}}  {_state(run):<13}  {len(run.evaluations):>5}  {samples:>10,}  "
        f"{'-' if loss is None else f'{loss:.4f}':>7}  {to_target:>11}  "
        f"{f'{minutes:.2f}' if isfinite(minutes) else '-':>7}"
    )


def _state(run: ObservedRun) -> str:
    resumed = run.log is not None and run.log.first("run_resumed") is not None
    return f"{run.state}*" if resumed else run.state


def _curve(runs: Sequence[ObservedRun]) -> Iterator[str]:
    """Yield the mean loss of all runs at some evaluations, with the least and the greatest."""
    losses: dict[int, list[float]] = defaultdict(list)
    for run in runs:
        for samples, loss in run.evaluations:
            losses[samples].append(loss)
    if not losses:
        yield "no evaluation yet"
        return
    every = -(-len(losses) // _MOST_ROWS)
    shown = sorted(losses)[::-1][::every][::-1]
    most = max(max(losses[samples]) for samples in shown)
    yield "evaluation loss: mean, least and greatest of the runs"
    for samples in shown:
        values = losses[samples]
        mean = sum(values) / len(values)
        bar = "#" * round(_BAR * (mean / most)) if isfinite(mean) and 0 < most < inf else ""
        yield (
            f"{samples:>12,}  {mean:.4f}  {min(values):.4f} .. {max(values):.4f}  "
            f"{len(values):>3} {'run ' if len(values) == 1 else 'runs'}  {bar}"
        )


def _verdict(runs: Sequence[ObservedRun], ruleset: str) -> Iterator[str]:
    """Yield how many runs converged, their spread, and what the comparison with the reference says so far."""
    converged = [run.log.samples for run in runs if run.log and run.log.samples is not None]
    ended = sum(run.is_over for run in runs)
    yield (
        f"{counted(len(runs), 'run')}: {ended} ended, {len(converged)} reached the target"
        + (
            f" after {min(converged):,} to {max(converged):,} samples"
            f" (standard deviation {pstdev(converged):,.0f})"
            if converged
            else ""
        )
    )
    if any(run.log is not None and run.log.first("run_resumed") for run in runs):
        yield "* the run was interrupted and resumed: the rules leave open whether it counts"
    if failed := [sanitize(run.name) for run in runs if run.state == "failed"]:
        yield f"{', '.join(failed)} failed: no run of a result, but in its record; --runs adds runs"
    for run in runs:
        if run.log is not None and run.log.closed and run.log.first(DIVISION_KEY) is not None:
            yield f"{sanitize(run.name)} left the closed division: no result of it has this run"
    found = [run.log for run in runs if run.log is not None]
    logs = [log for log in found if log.first("submission_division") is not None]
    if not logs or not logs[0].closed:
        yield "open division: no comparison with the reference" if logs else "no log yet"
        return
    size = logs[0].number("global_batch_size")
    if size is not None:
        yield from _comparison(runs, size, ruleset)


def _comparison(runs: Sequence[ObservedRun], size: int, ruleset: str) -> Iterator[str]:
    point = rcp.reference_point(size, ruleset)
    if point is not None:
        low, high = point.band
        yield (
            f"the reference's runs at global batch size {size} need {low:,.0f} to {high:,.0f} samples; "
            f"a mean of {point.minimum:,.0f} is accepted"
        )
        for run in runs:
            if run.forecast is not None and run.forecast < low:
                name = sanitize(run.name)
                yield f"{name} is faster than the reference's runs: look for a difference from it"
    logs = [run.log for run in runs if run.log is not None and run.state != "failed"]
    if all(run.is_over for run in runs) and len(logs) >= rcp.NUM_RUNS:
        yield _judged([log.samples for log in median_window(logs)], size, ruleset)
        return
    counts = [run.forecast for run in runs if run.state != "failed"][: rcp.NUM_RUNS]
    if len(counts) < rcp.NUM_RUNS:
        yield f"a result needs {rcp.NUM_RUNS} runs"
    elif sum(count is None for count in counts) <= 1:
        yield f"if the runs need what is forecast: {_judged(counts, size, ruleset)}"


def _judged(samples: Sequence[int | None], size: int, ruleset: str) -> str:
    return rcp.explain(rcp.compare_with_reference(samples, size, ruleset), size, ruleset)
