"""The plans of evaluate, sample, preprocess and benchmark."""

from __future__ import annotations

import json
import re
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.paths import EXAMPLES, ROOT
from torch._subclasses.fake_tensor import FakeTensorMode

from fluxtrain.cli import main
from fluxtrain.contract.run.config import RunConfig, Sharding
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import EXIT_OK, EXIT_USAGE
from fluxtrain.model.cost import forward_flops
from fluxtrain.parallel.compile import attention_backend
from fluxtrain.parallel.parallelize import allocate, empty_model
from fluxtrain.plan import measurement
from fluxtrain.plan.measurement import Step, eager, fake_world
from fluxtrain.plan.table import gib
from fluxtrain.runtime.devices import find_gpu
from fluxtrain.train.memory import forward_memory
from fluxtrain.train.micro_batch import USABLE

BENCHMARK = EXAMPLES / "benchmark.yaml"
TEXT = {"prompts": ["a fox", "a hare", "an owl"], "num_steps": 4, "cfg_scale": 2.0}


def job(folder: Path, task: str, gpus: int = 2, **run: Any) -> Path:
    """Return the file of a ``task`` on one node."""
    path = folder / "job.yaml"
    head = {"apiVersion": "fluxtrain.dev/v1alpha1", "kind": "FluxTraining"}
    values = {"preset": "dev-finetune", "task": task, **run}
    spec = {"gpusPerNode": gpus, "run": values}
    path.write_text(yaml.safe_dump({**head, "metadata": {"name": "j"}, "spec": spec}))
    return path


def planned(capsys: pytest.CaptureFixture[str], file: Path, *options: str) -> list[Any]:
    assert main(["plan", str(file), "--json", *options]) == EXIT_OK
    found: list[Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("num_bytes", "said"),
    [(0, "0 GiB"), (2**18, "0.25 MiB"), (2**24, "0.016 GiB"), (2**40 - 1, "1,024 GiB")],
)
def test_memory_is_in_gib_but_for_the_least(num_bytes: int, said: str) -> None:
    assert gib(num_bytes) == said


def test_a_benchmark_has_a_plan_for_each_setting(capsys: pytest.CaptureFixture[str]) -> None:
    small, large = planned(capsys, BENCHMARK)
    assert [small["name"][:6], large["name"][:7]] == ["512 px", "1024 px"]
    for each in (small, large):
        assert each["memory_bytes"] <= USABLE * each["gpu_memory_bytes"]
        assert each["seconds"] > 0
    assert small["batch_size"] > large["batch_size"] > 1
    assert small["samples_per_second"] > 2 * large["samples_per_second"]


def test_the_benchmark_for_a_cpu_needs_little_memory(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, EXAMPLES / "benchmark-cpu.yaml")
    assert [each["batch_size"] for each in found] == 2 * [1, 8, 32]
    assert {each["gpu"] for each in found} == {None}
    assert max(each["memory_bytes"] for each in found) < 1 << 30
    assert "run examples/benchmark-cpu.yaml" in (ROOT / "docs" / "benchmark.md").read_text()


def test_its_table_has_a_heading_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--benchmark.image_sizes=[512]", "--benchmark.micro_batch_sizes=[1, 400]")
    assert main(["plan", str(BENCHMARK), *options, "--gpu=H100"]) == EXIT_OK
    said = capsys.readouterr().out
    assert said.count("512 px, 512 text tokens, bfloat16") == 2
    assert "on each of 8 × H100" in said
    assert said.count(": fits") == said.count(": DOES NOT FIT") == 1


@pytest.mark.parametrize(
    ("command", "verdict", "rest"),
    [
        ("benchmark", "Fits: 164 GiB of 192 GiB (86%) of each of 8 × MI300X", "Time: 8 min."),
        ("benchmark-cpu", "Memory: 0.2 GiB of 1 × CPU process.", ""),
        ("mlperf-from-raw/3-preprocess", "Fits: 9.3 GiB of 192 GiB (5%) of each of 32", ""),
        (
            "mlperf-schnell --task=evaluate --gpu=H100 --evaluation.batch_size=4096",
            "DOES NOT FIT: 384 GiB of 80 GiB (483%) of each of 64 × H100",
            "To fit: --evaluation.batch_size=512.",
        ),
        (
            "benchmark --benchmark.micro_batch_sizes=[1,400]",
            "DOES NOT FIT: 11,755 GiB of 192 GiB",
            "To fit: --benchmark.micro_batch_sizes=[5]. Time: ",
        ),
        (
            "mlperf-schnell --task=sample --gpu=RTX4090",
            "DOES NOT FIT: 22 GiB of 24 GiB",
            "No change of its settings makes it fit. Time: ",
        ),
    ],
)
def test_the_plan_of_a_task_begins_with_the_answer(
    command: str, verdict: str, rest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether it fits, the option with which it would, and the time where it is known."""
    name, *options = command.split()
    arguments = ["plan", str(EXAMPLES / f"{name}.yaml"), *options]
    assert main(arguments) == EXIT_OK
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(verdict)
    assert rest in first
    if option := re.search(r"--\S+=\S+(?=\.( |$))", first):
        assert main([*(each for each in arguments if each != options[-1]), option[0]]) == EXIT_OK
        assert capsys.readouterr().out.startswith("Fits: ")


def test_an_image_takes_its_steps_twice_with_guidance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = job(tmp_path, "sample", sampling=TEXT, initial_weights="flux1-dev.safetensors")
    (found,) = planned(capsys, file, "--mfu=0.5", "--gpu=H100")
    config = resolve({"preset": "dev-finetune"})
    flops = forward_flops(config.model, config.image_tokens, config.data.text_length)
    rate = 0.5 * find_gpu("H100").peak_flops / (2 * TEXT["num_steps"] * flops)
    assert found["samples"] == len(TEXT["prompts"])
    assert found["samples_per_second"] == pytest.approx(2 * rate)
    assert found["seconds"] == pytest.approx(2 / rate)  # of three images one rank samples two
    assert 22 << 30 < found["memory_bytes"] < 30 << 30  # the whole model in bfloat16


def test_an_evaluation_counts_the_samples_that_are_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    synthetic = {"source": "synthetic", "synthetic": {"validation_samples": 100}}
    run = {"initial_weights": "flux1-dev.safetensors", "evaluation": {"batch_size": 4}}
    (found,) = planned(
        capsys, job(tmp_path, "evaluate", data={"validation": "v", **synthetic}, **run)
    )
    assert (found["samples"], found["batch_size"]) == (100, 4)
    assert found["seconds"] == pytest.approx(100 / found["samples_per_second"])
    file = job(tmp_path, "evaluate", data={"validation": "v"}, **run)
    (unknown,) = planned(capsys, file, f"--data={tmp_path}")
    assert unknown["samples"] is unknown["seconds"] is None
    assert unknown["samples_per_second"] == found["samples_per_second"]
    assert main(["plan", str(file), f"--data={tmp_path}"]) == EXIT_OK
    assert capsys.readouterr().out.count("unknown  the samples are not here to be counted") == 1


def test_preprocessing_has_encoders_and_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = planned(capsys, EXAMPLES / "mlperf-from-raw/3-preprocess.yaml")
    assert 9 << 30 < found["memory_bytes"] < 11 << 30  # T5's encoder, CLIP-L and the autoencoder
    assert found["output_bytes_per_sample"] == 2 * (256 * 4096 + 768 + 2 * 16 * 32 * 32)
    assert found["seconds"] is None


@pytest.mark.parametrize(
    "option", ["--verify", "--gpu-hour=1", "--gpu-hour=0", "--measured=benchmark.json"], ids=str
)
def test_what_is_a_training_s_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(BENCHMARK), option]) == EXIT_USAGE
    assert "must be left out: spec.run.task is benchmark" in capsys.readouterr().err


def forward_peak(config: RunConfig, ranks: int) -> int:
    """Return the peak bytes of a forward pass without gradients, by torch's tracker."""
    with fake_world(1, ranks) as world:
        model = empty_model(config, world)
        with FakeTensorMode(allow_non_fake_inputs=True), attention_backend("flash"):
            allocate(model, world.device)
            step = Step(config, world, model)
            with measurement._tracker(step) as tracker, torch.no_grad():
                step._flow_loss(step.batch)
            devices = tracker.get_tracker_snapshot("peak").values()
    kinds = [item for each in devices for item in each.items() if isinstance(item[0], Enum)]
    return sum(used for kind, used in kinds if str(kind.value).lower() != "optstate")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_memory_is_enough_for_a_pass_without_gradients(ranks: int) -> None:
    batch = 8
    config = eager(
        resolve(
            {
                "preset": "mlperf-schnell",
                "model": {"depth": 2, "depth_single_blocks": 2},
                "parallel": {"micro_batch_size": batch},
                "schedule": {"global_batch_size": batch * ranks, "warmup_steps": 0},
                "optim": {"learning_rate": 1e-4},
                "logging": {"mlperf": {"division": "open"}},
            }
        )
    )
    planned = forward_memory(config, Sharding.of(config, ranks, ranks), batch)
    assert 1 <= planned / forward_peak(config, ranks) < 1.2
