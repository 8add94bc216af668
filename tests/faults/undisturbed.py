"""Compares the samples and the losses of a job with those of one undisturbed process."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cluster import commands
from cluster.kubectl import Manifest
from tests.end_to_end import stage
from tests.end_to_end.jobs import expected_samples, used_samples
from tests.faults.fault import Outcome

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
