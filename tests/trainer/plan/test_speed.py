"""The hours of a plan are those of a measurement, else predicted where the rates of the GPU are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.paths import MICRO
from tests.trainer.benchmark.fake_machine import FakeMachine

from fluxtrain.benchmark.results import JSON_FILE, Results
from fluxtrain.benchmark.task import Study
from fluxtrain.cli import main
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import EXIT_OK, EXIT_USAGE, ConfigError, DataError
from fluxtrain.model.cost import training_flops
from fluxtrain.parallel.distributed import World
from fluxtrain.plan.estimate import Plan, make_plan
from fluxtrain.plan.speed import MOVED_FILE, RATES, MeasuredSpeeds
from fluxtrain.plan.table import render

ALONE = World.alone()


def machine_at(num_nodes: int, device: str = "AMD Instinct MI300X") -> tuple[FakeMachine, World]:
    world = World(0, 0, num_nodes * 8, ALONE.device, 8, num_nodes)
    return FakeMachine(device=device), world


def measure(
    folder: Path,
    batches: list[int],
    num_nodes: int = 1,
    device: str = "AMD Instinct MI300X",
    **benchmark: Any,
) -> MeasuredSpeeds:
    """Return what a benchmark of `FakeMachine` leaves."""
    config = resolve(
        {"preset": "benchmark", "benchmark": {"micro_batch_sizes": batches, **benchmark}}
    )
    machine, world = machine_at(num_nodes, device)
    Study(config, world, machine.run, Results(folder, config)).run()
    return MeasuredSpeeds(folder / JSON_FILE)


def run_at(batch: int, num_ranks: int) -> dict[str, Any]:
    return {
        "preset": "benchmark",
        "task": "train",
        "schedule": {"global_batch_size": batch * num_ranks, "steps": 1000},
        "parallel": {"micro_batch_size": batch},
    }


def make_config(batch: int = 16, num_ranks: int = 8, **changes: Any) -> RunConfig:
    return resolve({**run_at(batch, num_ranks), **changes})


def plan_of(
    measured: MeasuredSpeeds, batch: int = 16, nodes: int = 1, gpu: str | None = None
) -> Plan:
    config = make_config(batch, 8 * nodes)
    return make_plan(config, nodes, 8, gpu, measured=measured)


def seconds_of_a_step(batch: int, num_ranks: int = 8) -> float:
    """Return what `FakeMachine` takes."""
    return (0.3 + 0.2 * batch) * (1 + 0.02 * (num_ranks - 1))


def test_a_measured_batch_has_its_hours(tmp_path: Path) -> None:
    plan = plan_of(measure(tmp_path, [8, 16]))
    assert plan.seconds == pytest.approx(1000 * seconds_of_a_step(16))
    assert plan.gpu == "MI300X"
    assert plan.measured is not None
    assert plan.measured.startswith("at batch 16 of each of 8 ranks on AMD Instinct MI300X (")
    config = make_config()
    flops = training_flops(config.model, config.image_tokens, config.data.text_length)
    rate = 16 / seconds_of_a_step(16)
    assert plan.mfu == pytest.approx(rate * flops / 1307.4e12)
    assert "Measured at batch 16" in render(plan)
    assert "Assumed: 30%" not in render(plan)


@pytest.mark.parametrize(("batch", "exact"), [(4, True), (12, True), (10, True), (24, False)])
def test_between_two_batches_the_time_of_a_step_is_interpolated(
    tmp_path: Path, batch: int, exact: bool
) -> None:
    plan = plan_of(measure(tmp_path, [4, 8, 16]), batch)
    true = 1000 * seconds_of_a_step(batch)
    assert plan.seconds == pytest.approx(true, rel=1e-9 if exact else 0.1)


def test_accumulated_micro_batches_take_their_time(tmp_path: Path) -> None:
    config = make_config(batch=32, parallel={"micro_batch_size": 16})
    plan = make_plan(config, 1, 8, measured=measure(tmp_path, [16]))
    assert plan.seconds == pytest.approx(1000 * 2 * seconds_of_a_step(16))


def test_the_nearest_number_of_ranks_that_was_measured_counts(tmp_path: Path) -> None:
    measured = measure(tmp_path, [16], num_nodes=4, scaling=["weak"])
    for nodes, nearest in ((1, 8), (3, 16), (4, 32), (9, 32)):
        plan = plan_of(measured, nodes=nodes)
        assert plan.seconds == pytest.approx(1000 * seconds_of_a_step(16, nearest)), nodes


def test_another_gpu_has_the_same_mfu(tmp_path: Path) -> None:
    measured = measure(tmp_path, [16])
    own, other = plan_of(measured), plan_of(measured, gpu="MI355X")
    assert (own.mfu, other.gpu) == (other.mfu, "MI355X")
    assert own.seconds is not None
    assert other.seconds == pytest.approx(own.seconds * 1307.4 / 2516.6)


def test_a_device_without_a_known_peak_has_hours_but_no_mfu(tmp_path: Path) -> None:
    measured = measure(tmp_path, [16], device="x86_64")
    plan = make_plan(make_config(), 8, 0, measured=measured)
    assert plan.seconds == pytest.approx(1000 * seconds_of_a_step(16))
    assert (plan.mfu, plan.gpu) == (None, None)
    assert "unknown" not in render(plan)
    with pytest.raises(
        ConfigError, match=r"--gpu: got 'H200'; a measurement on x86_64, whose peak"
    ):
        plan_of(measured, gpu="H200")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"depth": 2}}, "was measured with another spec.run.model"),
        (
            {"adapter": {}, "initial_weights": "a.safetensors", "parallel": {"offload_blocks": 1}},
            "was measured with another spec.run",
        ),
        (
            {"adapter": {"rank": 4}, "initial_weights": "a"},
            "was measured with another spec.run.adapter",
        ),
        ({"data": {"text_length": 256}}, "has 512 px, 512 text .*; needed is 512 px, 256 text"),
        ({"precision": {"fp8": "rowwise"}}, "needed is 512 px, 512 .*, bfloat16, fp8 rowwise"),
        ({"parallel": {"compile": False}}, "needed is .*, bfloat16, not compiled"),
    ],
)
def test_a_measurement_of_something_else_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"--measured: .*{message}"):
        make_plan(make_config(**changes), 1, 8, measured=measure(tmp_path, [16]))


def test_a_benchmark_without_a_measurement_says_so(tmp_path: Path) -> None:
    measured = measure(tmp_path, [64])  # more than the machine has room for
    with pytest.raises(ConfigError, match="has no measurement; needed is 512 px"):
        plan_of(measured)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"run": {}, "trials": [{"trial": 1}]}'])
def test_a_file_that_is_no_result_is_refused_with_its_name(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"other\.json: not the benchmark.json of a benchmark"):
        MeasuredSpeeds(path)
    assert main(["plan", str(MICRO), "--measured", str(path)]) == EXIT_USAGE
    assert "other.json" in capsys.readouterr().err
    assert main(["plan", str(MICRO), "--measured", str(tmp_path / "none.json")]) == EXIT_USAGE


def test_the_command_takes_a_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measure(tmp_path, [16])
    job = tmp_path / "job.yaml"
    spec = {"gpusPerNode": 8, "run": run_at(16, 8)}
    document = {"apiVersion": "fluxtrain.dev/v1alpha1", "kind": "FluxTraining", "spec": spec}
    job.write_text(json.dumps({**document, "metadata": {"name": "job"}}))
    command = ["plan", str(job), "--json", "--measured", str(tmp_path / JSON_FILE)]
    assert main(command) == EXIT_OK
    plan = json.loads(capsys.readouterr().out)
    assert plan["seconds"] == pytest.approx(1000 * seconds_of_a_step(16))
    with pytest.raises(SystemExit):
        main([*command, "--mfu", "0.4"])


@pytest.mark.parametrize("option", [("--measured", "benchmark.json"), ("--mfu", "0.4")])
def test_a_speed_is_refused_where_it_would_be_ignored(
    option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(MICRO), "--verify", *option]) == EXIT_USAGE
    assert f"{option[0]}: got '{option[1]}'; must be left out with --verify" in (
        capsys.readouterr().err
    )


def predict(gpu: str | None = "H200", nodes: int = 1, gpus: int = 1, **changes: Any) -> Plan:
    batch = nodes * gpus * 32
    base = {"preset": "mlperf-schnell", "logging": {"mlperf": {"division": "open"}}}
    base["schedule"] = {"global_batch_size": batch, "steps": 1000}
    return make_plan(resolve({**base, **changes}), nodes, gpus, gpu)


LORA = {"preset": "dev-lora", "initial_weights": "a", "schedule": {"steps": 10}, "logging": {}}


def lora(**adapter: Any) -> dict[str, Any]:
    return {**LORA, "adapter": {"rank": 16, **adapter}}


@pytest.mark.parametrize(
    ("gpu", "changes", "is_predicted"),
    [
        *((gpu, {}, True) for gpu in RATES),
        ("H200", {"precision": {"fp8": "tensorwise"}}, True),
        ("H200", {"precision": {"fp8": "rowwise"}}, True),
        ("H200", {"model": {"depth_single_blocks": 0}}, True),
        ("H200", {"parallel": {"kernels": ["blocks"]}}, True),
        ("H200", {"parallel": {"kernels": ["optimizer"]}}, False),
        ("H200", {"parallel": {"compile": False}}, False),
        ("H200", {"precision": {"compute": "float32"}}, False),
        ("H200", lora(), True),
        ("H200", lora(dora=True), False),
        ("H200", lora(kind="lokr"), False),
        ("H200", lora(base_dtype="fp8"), False),
        ("B200", {}, False),
        ("RTX 4090", {}, False),
    ],
)
def test_a_step_is_predicted_where_its_rates_and_bytes_are_known(
    gpu: str, changes: dict[str, Any], is_predicted: bool
) -> None:
    plan = predict(gpu, **changes)
    assert plan.is_predicted == is_predicted
    text = render(plan)
    how = "measured" if gpu == "H200" else "assumed"
    assert (f"generated code, at {how} rates of the GPU" in text) == is_predicted
    assert ("Assumed: 30% of the" in text) != is_predicted
    assert plan.mfu is not None
    assert 0.15 < plan.mfu < 0.7


def test_each_part_of_a_step_takes_its_time() -> None:
    """FLUX.1's step at its published FLOPs and parameters, on one GPU without FSDP2."""
    rates, plan = RATES["H200"], predict()
    tokens, width, blocks = 512, 3072, 57
    attention = 32 * blocks * 3 * 4 * tokens**2 * width
    products = (
        32 * training_flops(resolve({"preset": "mlperf-schnell"}).model, 256, 256) - attention
    )
    moved = json.loads(MOVED_FILE.read_text())["bfloat16"]
    units = 19 * sum(moved["double"]) + 38 * sum(moved["single"])
    copied = units * 32 * tokens * width * 2 + 28 * 11_891_178_560
    expected = products / rates.bfloat16 + attention / rates.attention + copied / rates.bandwidth
    assert plan.compute_seconds_per_step == pytest.approx(expected, rel=1e-3)
    assert plan.seconds == pytest.approx(1000 * expected, rel=1e-3)


def test_recomputed_blocks_take_their_forward_pass_again() -> None:
    plain, whole = (
        predict(parallel={"activation_checkpointing": part}).compute_seconds_per_step
        for part in (0.0, 1.0)
    )
    assert plain is not None
    assert whole is not None
    assert 1.25 < whole / plain < 1.4


def test_two_micro_batches_update_the_weights_once() -> None:
    one = predict(schedule={"global_batch_size": 32, "steps": 10}).compute_seconds_per_step
    two = predict(schedule={"global_batch_size": 64, "steps": 10}).compute_seconds_per_step
    assert one is not None
    assert two is not None
    update = 28 * 11_891_178_560 / RATES["H200"].bandwidth
    assert two == pytest.approx(2 * one - update, rel=1e-3)


def test_predicted_hours_include_the_waiting_for_other_nodes() -> None:
    plan = predict("MI300X", nodes=64, gpus=8, schedule={"global_batch_size": 1024, "steps": 1000})
    assert plan.compute_seconds_per_step is not None
    assert plan.exposed_seconds_per_step is not None
    assert plan.exposed_seconds_per_step > 0.02
    step = plan.compute_seconds_per_step + plan.exposed_seconds_per_step
    assert plan.seconds == pytest.approx(1000 * step)
    assert "The hours include the waiting." in render(plan)


def test_an_assumed_fraction_replaces_the_prediction() -> None:
    config = resolve({"preset": "mlperf-schnell"})
    plan = make_plan(config, 8, 8, "H200", 0.42)
    assert (plan.is_predicted, plan.mfu) == (False, 0.42)
    assert "Assumed: 42% of the H200" in render(plan)
