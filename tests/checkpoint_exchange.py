"""A checkpoint of one torch continues with another and back; only tests/torch_range.py runs this."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.paths import MICRO
from tests.trainer.commands import fluxtrain
from tests.trainer.outputs import losses

OTHER = os.environ.get("FLUXTRAIN_OTHER_PYTHON", sys.executable)


def arguments(output: Path, steps: int, processes: int) -> list[str]:
    """Return the command line that trains up to step ``steps``."""
    run = ("run", str(MICRO), f"--output={output}", f"--processes={processes}")
    return [
        *(*run, f"--schedule.steps={steps}"),
        *("--logging.every_steps=1", "--evaluation.every_samples=0"),
    ]


def train_with_other(*options: str) -> None:
    """Run ``fluxtrain OPTIONS`` with the other torch."""
    command = [OTHER, "-m", "fluxtrain.cli", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def train(*options: str) -> None:
    """Run ``fluxtrain OPTIONS`` with this torch."""
    done = fluxtrain(*options)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.torch_range
def test_a_run_continues_with_another_torch_and_back(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(*arguments(whole, 12, 1))
    train_with_other(*arguments(parts, 4, 2))
    train(*arguments(parts, 8, 3))
    train_with_other(*arguments(parts, 12, 1))
    assert list(losses(parts)) == list(losses(whole)) == list(range(1, 13))
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-4)
