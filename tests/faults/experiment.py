"""Does one fault to a job that trains, and measures what happens."""

from __future__ import annotations

import time

from cluster.errors import ClusterError
from tests.faults.fault import Fault, Outcome
from tests.faults.target import Target
from tests.faults.timeline import first_sign, longest_pause, lost_steps
from tests.faults.watch import Watch


def measure(fault: Fault, target: Target) -> Outcome:
    """Return the outcome of ``fault``; an error of the job or of a wait is part of it."""
    outcome = Outcome(fault)
    try:
        target.wait_until_steady()
    except (AssertionError, ClusterError) as error:
        outcome.error = f"not started, as the job does not train: {_brief(error)}"
        return outcome
    before, outcome.steps = target.restarts, (target.step, target.step)
    watch = Watch(target)
    time.sleep(2)  # the present state is not a report of the fault
    began = time.monotonic()
    try:
        with fault.inject(target):
            target.wait_for_steps()
        target.wait_until_steady()
        target.wait_for_report()
        outcome.restarts = {kind: count - before[kind] for kind, count in target.restarts.items()}
    except (AssertionError, ClusterError, OSError, StopIteration) as error:
        outcome.error = _brief(error)
        print(error, flush=True)
    finally:
        watch.close()
    outcome.steps = (outcome.steps[0], target.step)
    outcome.lost_steps = lost_steps(watch.steps)
    outcome.pause_seconds = longest_pause(watch.steps, began)
    outcome.detected = first_sign(watch.signs, began)
    return outcome


def _brief(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
