"""Options of commands: their limits, and what a plan prints besides its tables."""

from __future__ import annotations

import json

import pytest
from tests.paths import ROOT

from fluxtrain.cli import main
from fluxtrain.errors import EXIT_OK, EXIT_USAGE

MLPERF = str(ROOT / "examples" / "mlperf-schnell.yaml")


@pytest.mark.parametrize("number", [0, -3, 1025])
@pytest.mark.parametrize(
    "command",
    [("run", str(ROOT / "examples" / "micro.yaml")), ("sample", "absent", "--output=x")],
)
def test_a_number_of_processes_out_of_range_is_refused(
    command: tuple[str, ...], number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, f"--processes={number}"]) == EXIT_USAGE
    error = f"--processes: got {number}; must be between 1 and 1024"
    assert error in capsys.readouterr().err


def test_a_plan_names_the_convergence_point_and_ignores_no_field(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", MLPERF]) == EXIT_OK
    errors = capsys.readouterr().err
    assert "6.1.0: the reference needs 7,223,524 samples" in errors
    assert "ignored" not in errors, "a plan is for spec.nodes and spec.gpusPerNode"


def test_a_plan_as_json_prints_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", MLPERF, "--json"]) == EXIT_OK
    output = capsys.readouterr()
    assert output.err == ""
    assert json.loads(output.out)["global_batch_size"] == 512
