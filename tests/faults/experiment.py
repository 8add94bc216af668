"""Does one fault to a job that trains, and measures what happens."""

from __future__ import annotations

import time
from collections.abc import Callable

from cluster.errors import ClusterError
from tests.faults.fault import Fault, Outcome
from tests.faults.target import Target
from tests.faults.timeline import first_sign, longest_pause, lost_steps, seconds_to_new_pod
from tests.faults.watch import Watch

FAILURES = (AssertionError, ClusterError, OSError, StopIteration)
SETTLE_SECONDS = 2.0
"""So that the first polls see the state before the fault."""


def measure(fault: Fault, target: Target) -> Outcome:
    """Return the outcome of ``fault``; an error of the job or of a wait is part of it."""
    if error := _error_of(lambda: _prepare(fault, target)):
        return Outcome(fault, error=f"not done, as the job does not train: {error}")
    charged, causes, first = target.charged, target.causes, target.step
    watch = Watch(target)
    time.sleep(SETTLE_SECONDS)
    began = time.monotonic()
    error = _error_of(lambda: _disturb(fault, target, charged))
    watch.close()
    return Outcome(
        fault,
        steps=(first, target.step),
        detected=first_sign(watch.signs, began),
        replaced_seconds=seconds_to_new_pod(watch.signs, began),
        lost_steps=lost_steps(watch.steps),
        pause_seconds=longest_pause(watch.steps, began),
        charged=0 if error else target.charged - charged,
        causes={} if error else dict(target.causes - causes),
        error=error,
    )


def _prepare(fault: Fault, target: Target) -> None:
    target.wait_until_steady()
    if fault.spread:
        target.spread()


def _disturb(fault: Fault, target: Target, charged: int) -> None:
    with fault.inject(target):
        target.wait_for_steps()
    target.wait_until_steady()
    target.wait_for_charged(charged + fault.limits.charged)


def _error_of(action: Callable[[], None]) -> str:
    """Return the first line of the error of ``action``, "" if there is none; print the whole error."""
    try:
        action()
    except FAILURES as error:
        print(error, flush=True)
        return f"{type(error).__name__}: {_first_line(error)}"
    return ""


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
