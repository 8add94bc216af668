"""The arithmetic of reference convergence points, against MLCommons' own checker."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from mlperf_logging.rcp_checker import rcp_checker

from fluxtrain.mlperf import RULESETS
from fluxtrain.mlperf.rcp import (
    compatible_batch_sizes,
    expectation,
    explain,
    judge,
    reference_point,
    reference_points,
)

EVALUATION = 262_144
SIZES = [256, 512, 768, 1024, 1152, 1536, 2048, 2304, 3072, 4096, 8192]


def write_log(path: Path, size: int, samples: int | None) -> None:
    """Write the lines that the checker reads of one run; None did not converge."""
    last = samples or 10 * EVALUATION
    events = [
        ("submission_benchmark", "flux1", {}),
        ("global_batch_size", size, {}),
        ("eval_accuracy", 0.58, {"samples_count": last}),
        ("run_stop", None, {"status": "success" if samples else "aborted"}),
    ]
    lines = [":::MLLOG " + json.dumps({"key": k, "value": v, "metadata": m}) for k, v, m in events]
    path.write_text("\n".join(lines) + "\n")


def checker_says(
    folder: Path, ruleset: str, size: int, samples: list[int | None]
) -> tuple[bool, str, float]:
    for index, count in enumerate(samples):
        write_log(folder / f"result_{index}.txt", size, count)
    found: tuple[bool, str, float] = rcp_checker.check_directory(
        str(folder), "training", ruleset, False, False, rcp_pass="pruned_rcps"
    )
    return found


def around(mean: float) -> list[int | None]:
    """Return ten counts in whole evaluations, spread around ``mean``."""
    middle = round(mean / EVALUATION)
    return [EVALUATION * (middle + shift) for shift in (-3, -1, -1, 0, 0, 0, 0, 1, 1, 2)]


@pytest.mark.parametrize("ruleset", RULESETS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("speed", [0.93, 0.985, 1.05])
def test_the_verdict_is_the_checkers(
    ruleset: str, size: int, speed: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    point = reference_point(size, ruleset)
    samples = around((point.mean if point else 2e7) * speed)
    passed, _, factor = checker_says(tmp_path, ruleset, size, samples)
    ours = judge(samples, size, ruleset)
    assert ours.accepted == passed
    if passed:
        assert ours.scaling_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("lost", [1, 2])
def test_one_run_that_did_not_converge_is_dropped_and_two_are_not(
    lost: int, tmp_path: Path
) -> None:
    samples = [*around(8.5e6)[lost:], *[None] * lost]
    passed, _, _ = checker_says(tmp_path, "6.1.0", 512, samples)
    assert judge(samples, 512, "6.1.0").accepted == passed == (lost == 1)


@pytest.mark.parametrize("ruleset", RULESETS)
def test_means_minima_and_the_kept_points_are_the_checkers(ruleset: str) -> None:
    checker = rcp_checker.RCP_Checker("training", ruleset, "flux1", False)
    kept = {record["BS"]: record for record in checker.pruned_rcp_data.values()}
    ours = {point.global_batch_size: point for point in reference_points(ruleset)}
    assert ours.keys() == kept.keys()
    for size, record in kept.items():
        assert ours[size].mean == pytest.approx(record["RCP Mean"], rel=1e-12)
        assert ours[size].minimum == pytest.approx(record["Min Epochs"], abs=0.001)
    low, high = (kept[512], kept[2048])
    _, between = checker._create_interp_rcp(1024, low, high)
    if 1024 not in kept:
        point = reference_point(1024, ruleset)
        assert point is not None
        assert point.minimum == pytest.approx(between["Min Epochs"], abs=0.001)


def test_every_verdict_is_told_in_words() -> None:
    cases = {
        (512, 0.93): "refused: mean of 8 runs",
        (512, 0.99): "the score is multiplied by",
        (512, 1.05): "no scaling",
        (256, 1.05): "of the smallest measured global batch size, 512",
        (1024, 1.05): "interpolated for global batch size 1024",
        (8192, 1.0): "no reference above global batch size 4096",
    }
    for (size, speed), words in cases.items():
        point = reference_point(size, "6.1.0")
        mean = (point.mean if point else 2e7) * speed
        verdict = judge([mean] * 10, size, "6.1.0")
        assert words in explain(verdict, size, "6.1.0")
    nobody = judge([None] * 10, 512, "6.1.0")
    assert "did not converge" in explain(nobody, 512, "6.1.0")


def test_only_divisors_of_the_evaluation_interval_satisfy_all_rulesets() -> None:
    assert compatible_batch_sizes() == tuple(
        size for size in range(1, 4097) if EVALUATION % size == 0
    )


def test_a_closed_run_is_told_what_it_has_to_reach() -> None:
    (old, _, new) = expectation(512, RULESETS)
    assert old.startswith("5.1.0: the reference needs 8,170,155 samples, 31 evaluations")
    assert new.endswith("accepted from a mean of 7,112,400")
    assert "no one log at global batch size 2304" in expectation(2304, RULESETS)[-1]
    assert expectation(8192, ["6.1.0"])[0] == "6.1.0: no reference above global batch size 4096"
