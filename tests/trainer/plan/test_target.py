"""The plan of an MLPerf run: its time to the target by the reference's convergence points, and costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.paths import EXAMPLES, MICRO

from fluxtrain.cli import main
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.errors import EXIT_OK, EXIT_USAGE
from fluxtrain.mlperf import RULESETS
from fluxtrain.mlperf.rcp import reference_mean, reference_point

MLPERF = EXAMPLES / "mlperf-schnell.yaml"
GPUS = 64
PRICE = 2.5


def plan(capsys: pytest.CaptureFixture[str], *options: str, file: Path = MLPERF) -> str:
    assert main(["plan", str(file), *options]) == EXIT_OK
    return capsys.readouterr().out


def planned(capsys: pytest.CaptureFixture[str], *options: str, file: Path = MLPERF) -> Any:
    return json.loads(plan(capsys, "--json", *options, file=file))


def at(batch: int) -> tuple[str, ...]:
    """Return the options for a global batch; the preset has a learning rate for four of them."""
    rates = ("--optim.learning_rate=1e-4", "--schedule.warmup_steps=0")
    return (f"--schedule.global_batch_size={batch}", *rates)


def row(said: str, name: str) -> str:
    """Return the row called ``name``, with single blanks."""
    (line,) = (line for line in said.splitlines() if line.startswith(f"  {name}  "))
    return " ".join(line.split())


@pytest.mark.parametrize("batch", [512, 1024, 1500])
def test_it_takes_as_long_as_the_reference_needs_samples(
    batch: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(capsys, *at(batch), f"--gpu-hour={PRICE}")
    point = reference_point(batch, RULESETS[-1])
    assert point is not None
    assert found["target_samples"] == point.mean
    assert found["target_seconds"] == pytest.approx(point.mean / found["samples_per_second"])
    for seconds, cost in (("seconds", "cost"), ("target_seconds", "target_cost")):
        assert found[cost] == pytest.approx(found[seconds] / 3600 * GPUS * PRICE)


def test_the_table_has_both_times_and_both_costs(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys)
    said = plan(capsys, "--gpu-hour=2.5")
    samples = f"{found['target_samples']:,.0f}"
    assert "30,000 steps at most" in row(said, "training")
    assert row(said, "to MLPerf's target").endswith(
        f"{samples} samples, the reference's mean: measured at global batch size 512"
    )
    hours = found["seconds"] * GPUS / 3600
    assert row(said, "cost") == f"cost {hours * PRICE:,.0f} {hours:,.0f} GPU hours at 2.5"
    hours = found["target_seconds"] * GPUS / 3600
    assert row(said, "cost to the target") == (
        f"cost to the target {hours * PRICE:,.0f} {hours:,.0f} GPU hours at 2.5"
    )


def test_the_answer_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    fits, training, target, empty, *_ = plan(capsys, "--gpu-hour=2.5").splitlines()
    assert fits == "Fits: 51 GiB of 192 GiB (26%) of each of 64 × MI300X."
    assert training == "Training: 3.1 h, for 502."
    assert target.startswith("To MLPerf's target: 88 min, for 2")
    assert empty == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "options", "remedy"),
    [
        ("dev-finetune", ["--gpu=rtx4090"], "No change of its settings makes it fit."),
        (
            "dev-lora",
            ["--parallel.micro_batch_size=8", "--gpu=rtx4090"],
            "To fit: --parallel.micro_batch_size=1 --adapter.base_dtype=fp8"
            " --parallel.activation_checkpointing=1.0.",
        ),
        (
            "dev-lora",
            ["--data.image_size=512", "--parallel.micro_batch_size=1", "--gpu=rtx4090"],
            "To fit: --adapter.base_dtype=fp8",
        ),
        (
            "dev-lora",
            ["--parallel.micro_batch_size=8", "--gpu=h100"],
            "To fit: --parallel.micro_batch_size=",
        ),
    ],
)
def test_what_does_not_fit_names_a_change_that_does(
    preset: str,
    options: list[str],
    remedy: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "job.yaml"
    spec = f"{{nodes: {{min: 1, max: 1}}, gpusPerNode: 1, run: {{preset: {preset}}}}}"
    head = "apiVersion: fluxtrain.dev/v1alpha1\nkind: FluxTraining\nmetadata: {name: a}\nspec: "
    file.write_text(head + spec)
    names = {each.partition("=")[0] for each in options}
    wide = ["--schedule.global_batch_size=64"]
    wide += [] if "--data.image_size" in names else ["--data.image_size=1024"]
    first = plan(capsys, *wide, *options, file=file).splitlines()[0]
    assert first.startswith("DOES NOT FIT: ")
    assert remedy in first
    if change := first.partition("To fit: ")[2].rstrip(".").split():
        changed = {each.partition("=")[0] for each in change}
        given = [each for each in options if each.partition("=")[0] not in changed]
        assert plan(capsys, *wide, *given, *change, file=file).startswith("Fits: ")


@pytest.mark.parametrize(
    ("batch", "origin"),
    [
        (1024, "interpolated for global batch size 1024"),
        (64, "of the smallest measured global batch size, 512"),
    ],
)
def test_it_says_where_the_samples_are_from(
    batch: int, origin: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = plan(capsys, *at(batch))
    assert f"the reference's mean: {origin}" in row(said, "to MLPerf's target")


def test_a_batch_without_a_reference_has_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    options = (*at(65536), "--gpu-hour=1")
    said = plan(capsys, *options)
    assert "unknown no reference above global batch size" in row(said, "to MLPerf's target")
    found = planned(capsys, *options)
    assert found["target_samples"] is found["target_seconds"] is found["target_cost"] is None
    assert found["cost"] > 0


def test_steps_that_end_before_the_target_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    said = plan(capsys, "--schedule.steps=100", "--logging.mlperf.division=open")
    assert row(said, "to MLPerf's target").endswith("; THE STEPS END BEFORE")


@pytest.mark.parametrize(
    "run",
    [
        {"preset": "micro"},
        {
            "preset": "mlperf-schnell",
            "evaluation": {"target_loss": 0.5},
            "logging": {"mlperf": {"division": "open"}},
        },
    ],
    ids=["another model", "another target"],
)
def test_only_runs_to_its_target_have_one(run: dict[str, Any]) -> None:
    assert reference_mean(resolve(merge({}, run))) is None


def test_other_runs_have_a_cost_alone(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--evaluation.target_loss=0.5", "--logging.mlperf.division=open")
    said = plan(capsys, *options, "--gpu-hour=0.5")
    assert row(said, "cost").endswith("GPU hours at 0.5")
    assert "target" not in said


@pytest.mark.parametrize("price", ["0", "-1", "nan", "inf"])
def test_a_price_is_a_positive_number(price: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(MLPERF), f"--gpu-hour={price}"]) == EXIT_USAGE
    assert "--gpu-hour: got" in capsys.readouterr().err


def test_a_job_without_gpus_has_no_price(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(MICRO), "--gpu-hour=1"]) == EXIT_USAGE
    assert "the job has no GPUs" in capsys.readouterr().err
