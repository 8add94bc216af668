"""Which ten of more than ten runs are a result: the consecutive ones with the median score.

MLCommons' rules allow more runs than a result has, but not a choice among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from fluxtrain.mlperf.evidence import Run
from fluxtrain.mlperf.rcp import NUM_RUNS, score


def median_window(runs: Sequence[Run]) -> list[Run]:
    """Return the ten consecutive runs, by their start, whose score is the median of all such windows.

    Of two medians it is the slower. A window in which two runs did not converge is the slowest.
    """
    ordered = sorted(runs, key=_start)
    starts = range(max(1, len(ordered) - NUM_RUNS + 1))
    windows = [ordered[start : start + NUM_RUNS] for start in starts]
    ranked = sorted(windows, key=lambda window: score([run.minutes for run in window], 1.0))
    return ranked[len(ranked) // 2]


def _start(run: Run) -> float:
    """Return the time of run_start in milliseconds; runs without one come last."""
    line = run.first("run_start")
    return inf if line is None else float(line.fields["time_ms"])
