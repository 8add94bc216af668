"""The factor of adapters' updates: refused where it is no usable number, before anything is read."""

from __future__ import annotations

import subprocess
import sys

import pytest

MERGE = ("adapter", "merge", "weights", "lora", "--output", "merged")
SAMPLE = ("sample", "weights", "--adapter", "lora")


@pytest.mark.parametrize("command", [MERGE, SAMPLE])
@pytest.mark.parametrize("value", ["nan", "inf", "1e39", "-1000.5", "strong"])
def test_a_strength_that_is_no_usable_number_is_refused(
    command: tuple[str, ...], value: str
) -> None:
    program = (sys.executable, "-m", "fluxtrain.cli", *command, "--strength", value)
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert f"--strength: got '{value}'; must be a number from -1000 to 1000" in done.stderr
