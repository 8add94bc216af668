"""The computation of reference convergence points against MLCommons' checker."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from mlperf_logging.rcp_checker import rcp_checker

from fluxtrain.mlperf import RULESETS
from fluxtrain.mlperf.rcp import (
    compare_with_reference,
    compatible_batch_sizes,
    describe_targets,
    explain,
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


def checker_result(
    folder: Path, ruleset: str, size: int, samples: list[int | None]
) -> tuple[bool, str, float]:
    for index, count in enumerate(samples):
        write_log(folder / f"result_{index}.txt", size, count)
    result: tuple[bool, str, float] = rcp_checker.check_directory(
        str(folder), "training", ruleset, False, False, rcp_pass="pruned_rcps"
    )
    return result


def around(mean: float) -> list[int | None]:
    """Return ten counts in whole evaluations, spread around ``mean``."""
    middle = round(mean / EVALUATION)
    return [EVALUATION * (middle + shift) for shift in (-3, -1, -1, 0, 0, 0, 0, 1, 1, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("ruleset", RULESETS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("speed", [0.93, 0.985, 1.05])
def test_the_result_is_that_of_the_checker(
    ruleset: str, size: int, speed: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    point = reference_point(size, ruleset)
    samples = around((point.mean if point else 2e7) * speed)
    passed, _, factor = checker_result(tmp_path, ruleset, size, samples)
    ours = compare_with_reference(samples, size, ruleset)
    assert ours.accepted == passed
    if passed:
        assert ours.scaling_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("lost", [1, 2])
def test_only_one_run_may_fail_to_converge(lost: int, tmp_path: Path) -> None:
    samples = [*around(8.5e6)[lost:], *[None] * lost]
    passed, _, _ = checker_result(tmp_path, "6.1.0", 512, samples)
    assert compare_with_reference(samples, 512, "6.1.0").accepted == passed == (lost == 1)


@pytest.mark.parametrize("ruleset", RULESETS)
def test_points_means_and_minima_are_those_of_the_checker(ruleset: str) -> None:
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


def test_every_result_is_explained() -> None:
    cases = {
        (512, 0.93): "refused: mean of 8 runs",
        (512, 0.99): "the score is multiplied by",
        (512, 1.05): "no scaling",
        (256, 1.05): "of the smallest measured global batch size, 512",
        (1024, 1.05): "interpolated for global batch size 1024",
        (8192, 1.0): "no reference above global batch size 4096",
    }
    for (size, speed), text in cases.items():
        point = reference_point(size, "6.1.0")
        mean = (point.mean if point else 2e7) * speed
        result = compare_with_reference([mean] * 10, size, "6.1.0")
        assert text in explain(result, size, "6.1.0")
    none_converged = compare_with_reference([None] * 10, 512, "6.1.0")
    assert "did not converge" in explain(none_converged, 512, "6.1.0")


def test_only_divisors_of_the_evaluation_interval_satisfy_all_rulesets() -> None:
    assert compatible_batch_sizes() == tuple(
        size for size in range(1, 4097) if EVALUATION % size == 0
    )


def test_the_targets_of_a_closed_run_are_described() -> None:
    (old, _, new) = describe_targets(512, RULESETS)
    assert old.startswith("5.1.0: the reference needs 8,170,155 samples, 31 evaluations")
    assert new.endswith("accepted from a mean of 7,112,400")
    assert "no single log at global batch size 2304" in describe_targets(2304, RULESETS)[-1]
    assert (
        describe_targets(8192, ["6.1.0"])[0] == "6.1.0: no reference above global batch size 4096"
    )
