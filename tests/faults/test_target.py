"""The jobs of the faults, and the newest step at the end of metrics.jsonl, whatever a writer left there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.faults.fault import Fault
from tests.faults.matrix import FAULTS
from tests.faults.target import IMAGE, SPEC, manifest, newest_step

from fluxtrain_operator.planner.plan import load

LINES = "".join(json.dumps({"step": step, "train_loss": 1.0}) + "\n" for step in range(1, 200))


@pytest.mark.parametrize(
    ("text", "step"),
    [
        (None, 0),
        ("", 0),
        ('{"step": 1}', 0),  # without a newline it may be incomplete
        ('{"step": 1}\n', 1),
        ('{"step": 1}\n{"ste', 1),
        (LINES, 199),
        (LINES + '{"step": 200, "train', 199),
        ("not JSON\n", 0),
    ],
)
def test_newest_step(tmp_path: Path, text: str | None, step: int) -> None:
    path = tmp_path / "metrics.jsonl"
    if text is not None:
        path.write_text(text)
    assert newest_step(path) == step


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_operator_accepts_the_job_of_each_fault(fault: Fault) -> None:
    job = load(manifest("job-1", {**SPEC, **(fault.own_job or {})}), "default")
    assert job.image == IMAGE
    assert job.config.logging.ledger, "the samples of each step are written"
    assert job.config.checkpoint.asynchronous
