"""A closed-division run under MLPerf's real cadence, accepted by MLCommons' compliance checker."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from tests.paths import MICRO
from tests.trainer import ranks
from tests.trainer.outputs import losses, mlperf_events, mlperf_values
from tests.trainer.small_runs import ENCODED_RUN, as_closed, write_encoded

from fluxtrain.cli import main
from fluxtrain.contract.process import CONFIG_FILE, RunPaths
from fluxtrain.contract.run.closed_division import require_whole_sets
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import EXIT_ERROR, EXIT_USAGE, DataError
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


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run of the micro model that claims the closed division."""
    paths = RunPaths(*(tmp_path_factory.mktemp("closed") for _ in range(3)))
    config = as_closed(resolve({"preset": "micro", **CLOSED}))
    assert ranks.finish(ranks.train_alone, config, paths) == [0], ranks.output_of(paths)
    (paths.output / CONFIG_FILE).write_text(config.model_dump_json())
    return paths.output


def test_the_micro_model_is_refused_as_closed_and_open_by_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    closed = "--logging.mlperf.division=closed"
    assert main(["run", str(MICRO), f"--output={tmp_path}", closed]) == EXIT_USAGE
    assert "the closed one is that of the presets mlperf-*" in capsys.readouterr().err
    assert resolve({"preset": "micro"}).logging.mlperf.division == "open"


@pytest.mark.parametrize(
    ("sizes", "wrong"),
    [
        ((1_099_776, 29_696), []),
        ((4096, 29_696), ["train has 4096 samples; allowed: 1099776"]),
        (
            (1_099_775, 29_695),
            ["train has 1099775", "validation has 29695 samples; allowed: 29696"],
        ),
        ((0, 0), ["train has 0", "validation has 0"]),
    ],
)
def test_a_closed_run_needs_the_whole_sets(sizes: tuple[int, int], wrong: list[str]) -> None:
    config = resolve({"preset": "mlperf-schnell"})
    with pytest.raises(DataError) if wrong else nullcontext() as error:
        require_whole_sets(config, *sizes)
    for text in wrong:
        assert f"spec.run.data.{text}" in str(error.value)
        assert "(training rules 6.5)" in str(error.value)
    open_run = {"preset": "mlperf-schnell", "logging": {"mlperf": {"division": "open"}}}
    require_whole_sets(resolve(open_run), *sizes)


def test_a_closed_run_on_other_sets_ends_before_it_starts(tmp_path: Path) -> None:
    write_encoded(tmp_path)
    paths = RunPaths(tmp_path / "output", tmp_path, tmp_path)
    small = resolve(ENCODED_RUN)  # of the benchmark by its preset alone, so that it fits here
    config = as_closed(small.model_copy(update={"preset": "mlperf-schnell"}))
    assert ranks.finish(ranks.train_alone, config, paths) == [EXIT_USAGE]
    assert "data.train has 21 samples; allowed: 1099776 (training rules 6.5)" in ranks.output_of(
        paths
    )
    assert mlperf_values(paths.output, "block_start") == []


@pytest.mark.parametrize("ruleset", ["5.1.0", "6.0.0", "6.1.0"])
def test_mlcommons_checker_accepts_a_closed_division_run(output: Path, ruleset: str) -> None:
    result = check(output / "mlperf.log", ruleset)
    assert result.success, result.explanations


def test_the_review_finds_that_it_is_not_the_benchmark(
    output: Path, mlperf: Callable[..., str]
) -> None:
    stdout = mlperf(EXIT_ERROR, "check", output / "mlperf.log")
    assert stdout.startswith("SUCCESS")
    assert "config.json is of the preset micro, which is not the benchmark" in stdout
    assert "data.source is synthetic in config.json" in stdout
    found = set(re.findall(r"\d+\. ([a-z-]+) \(training rules", stdout))
    wrong = {"benchmark-configuration", "benchmark-data", "configuration-is-valid"}
    noted = {"evaluations-take-their-time"}  # as fast as the machine is
    assert found - noted == {*wrong, "caches-are-flushed"}


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
