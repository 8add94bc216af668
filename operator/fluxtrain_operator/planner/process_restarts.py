"""Restarts of processes that agents tell the rendezvous service: each is counted once.

A generation ends at most once, and all agents tell its end before a later one can fail. So those after the
newest counted generation of the attempt are new, whoever tells them, and however often.
"""

from __future__ import annotations

from fluxtrain.contract.resource.status import CountedRestarts, Restarts
from fluxtrain_operator.members import Heard, ProcessRestart

MAX_COUNT = 2**31 - 1


def new_restarts(before: Restarts, heard: Heard, attempt: int) -> tuple[ProcessRestart, ...]:
    """Return the restarts in ``heard`` that ``before`` does not count, by generation."""
    counted = before.counted
    if counted is None or not counted.attempt == attempt == heard.attempt:
        return ()
    return tuple(r for r in heard.restarts if r.generation > counted.generation)


def next_counted(before: Restarts, heard: Heard, attempt: int) -> CountedRestarts | None:
    """Return how far the restarts of ``attempt`` are counted with those in ``heard``.

    In the middle of an attempt that an operator without this count began, it begins with the first answer:
    what was told until then, that operator counted otherwise. Until then it is unchanged.
    """
    counted = before.counted
    newest = max((restart.generation for restart in heard.restarts), default=0)
    if counted is None or counted.attempt != attempt:
        if heard.attempt != attempt:
            return counted
        return CountedRestarts(attempt=attempt, generation=newest, process=before.process)
    new = new_restarts(before, heard, attempt)
    if not new:
        return counted
    process = min(MAX_COUNT, counted.process + len(new))
    return CountedRestarts(attempt=attempt, generation=newest, process=process)


def first_counted(attempt: int, process: int) -> CountedRestarts:
    """Return the count at the beginning of ``attempt``, after ``process`` restarts."""
    return CountedRestarts(attempt=attempt, process=process)
