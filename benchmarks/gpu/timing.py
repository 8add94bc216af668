"""Seconds of work on the device: events around it on a GPU, the clock on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

_WARMUP = 3
_MIN_REPEATS, _MAX_REPEATS = 5, 50
_SECONDS = 0.3  # of all repeats


def wait() -> None:
    """Wait until the device has done all its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object]) -> float:
    """Return the median seconds that ``work`` takes on the device."""
    for _ in range(_WARMUP):
        work()
    once = _once(work)
    repeats = min(_MAX_REPEATS, max(_MIN_REPEATS, int(_SECONDS / max(once, 1e-6))))
    return median(_once(work) for _ in range(repeats))


def _once(work: Callable[[], object]) -> float:
    if not torch.cuda.is_available():
        begin = perf_counter()
        work()
        return perf_counter() - begin
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin_event.record()
    work()
    end_event.record()
    torch.cuda.synchronize()
    return begin_event.elapsed_time(end_event) / 1000
