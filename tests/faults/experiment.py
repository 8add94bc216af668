"""Does one fault to a job that trains, and compares its samples and losses with an undisturbed process."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cluster import commands
from cluster.errors import ClusterError
from cluster.kubectl import Manifest
from tests.end_to_end import stage
from tests.end_to_end.jobs import expected_samples, used_samples
from tests.faults.fault import (
    Fault,
    Outcome,
    first_sign,
    longest_pause,
    lost_steps,
    seconds_to_new_pod,
)
from tests.faults.target import Target
from tests.faults.watch import Watch

RUN_SECONDS = 1200.0


def compare(outcomes: Sequence[Outcome], output: Path, run: Manifest) -> None:
    """Set the samples and the loss difference of each outcome of the job that wrote ``output``.

    The job must be stopped. Raises AssertionError if its metrics lack a step.
    """
    ours = stage.losses(output)
    last = max(ours, default=0)
    assert list(ours) == list(range(1, last + 1)), "metrics.jsonl has each step once, in order"
    alone = _losses_alone(run, last, output)
    used, expected = used_samples(output), expected_samples(run, last)
    wrong = {step for step in used.keys() | expected if used.get(step) != expected.get(step)}
    for outcome in outcomes:
        first, final = outcome.steps
        window = range(first, min(final, last) + 1)
        outcome.wrong_samples = sum(step in wrong for step in window)
        differences = [abs(ours[step] - alone[step]) for step in window if step in ours]
        outcome.loss_difference = max(differences, default=None)


def _losses_alone(run: Manifest, steps: int, data: Path) -> dict[int, float]:
    """Return the losses of one process, without checkpoints and evaluations, which do not change them."""
    undisturbed = {
        **run,
        "schedule": {**run["schedule"], "steps": steps},
        "checkpoint": {"every_steps": 0},
        "evaluation": {"every_samples": 0},
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file, output = folder / "job.json", folder / "output"
        file.write_text(json.dumps(stage.job("undisturbed", run=undisturbed)))
        options = ["--output", output, "--data", data, "--logging.metrics_port=0"]
        command = [sys.executable, "-m", "fluxtrain.cli", "run", file, *options]
        commands.run(command, env={"OMP_NUM_THREADS": "1"}, seconds=RUN_SECONDS)
        return stage.losses(output)


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
