"""A closed-division run under MLPerf's real cadence, accepted by MLCommons' compliance checker."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from tests.paths import MICRO
from tests.trainer.commands import fluxtrain
from tests.trainer.outputs import losses, mlperf_events

from fluxtrain.cli import main
from fluxtrain.errors import EXIT_ERROR
from fluxtrain.mlperf import check

pytestmark = pytest.mark.slow

GLOBAL_BATCH_SIZE = 2048
CADENCE = math.ceil(262_144 / GLOBAL_BATCH_SIZE) * GLOBAL_BATCH_SIZE
CLOSED = {
    "schedule": {"global_batch_size": GLOBAL_BATCH_SIZE, "steps": 600},
    "parallel": {"micro_batch_size": GLOBAL_BATCH_SIZE},
    "data": {"synthetic": {"train_samples": 1_099_776, "validation_samples": 29_696, "classes": 4}},
    "evaluation": {"every_samples": 262_144, "target_loss": 0.586, "batch_size": GLOBAL_BATCH_SIZE},
    "checkpoint": {"every_steps": 0},
    "logging": {"every_steps": 16, "metrics_port": 0},
}


def flags(values: dict[str, dict[str, object]]) -> list[str]:
    return [
        f"--{section}.{name}={json.dumps(value)}"
        for section, fields in values.items()
        for name, value in fields.items()
    ]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished closed-division run of the micro model."""
    folder = tmp_path_factory.mktemp("closed")
    completed = fluxtrain("run", str(MICRO), "--output", str(folder), *flags(CLOSED))
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.startswith(":::MLLOG"), "stdout is the MLPerf log"
    return folder


@pytest.mark.parametrize("ruleset", ["5.1.0", "6.0.0", "6.1.0"])
def test_mlcommons_checker_accepts_a_closed_division_run(output: Path, ruleset: str) -> None:
    result = check(output / "mlperf.log", ruleset)
    assert result.success, result.explanations


def test_the_review_finds_that_it_is_not_the_benchmark(
    output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["mlperf", "check", str(output / "mlperf.log")]) == EXIT_ERROR
    stdout = capsys.readouterr().out
    assert stdout.startswith("SUCCESS")
    assert "config.json is of the preset micro, which is not the benchmark" in stdout
    assert "data.source is synthetic in config.json" in stdout
    found = set(re.findall(r"\d+\. ([a-z-]+) \(training rules", stdout))
    assert found == {"benchmark-configuration", "benchmark-data", "caches-are-flushed"}


def test_the_log_has_the_values_of_the_run(output: Path) -> None:
    events = mlperf_events(output)
    by_key = {event["key"]: event for event in events}
    evaluations = [
        event["metadata"]["samples_count"] for event in events if event["key"] == "eval_accuracy"
    ]
    assert evaluations == [CADENCE * (n + 1) for n in range(len(evaluations))]
    assert by_key["submission_division"]["value"] == "closed"
    assert by_key["global_batch_size"]["value"] == GLOBAL_BATCH_SIZE
    assert by_key["run_stop"]["metadata"]["status"] == "success"
    assert by_key["eval_accuracy"]["value"] <= 0.586
    measured = losses(output, "eval_loss")
    assert measured[max(measured)] == pytest.approx(by_key["eval_accuracy"]["value"])
