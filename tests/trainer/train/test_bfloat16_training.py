"""Runs whose weights are in bfloat16: their losses, checkpoints, resumes, exports and evaluations."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.trainer import in_process, ranks
from tests.trainer.outputs import losses
from torch import Tensor, nn

from fluxtrain import optim
from fluxtrain.cli import main
from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import Sharding
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.data.loader import training_batches
from fluxtrain.data.order import BatchShares
from fluxtrain.data.sources import open_sources
from fluxtrain.encode.encoders import batch_encoder
from fluxtrain.errors import EXIT_OK, EXIT_USAGE
from fluxtrain.model.loss import FlowLoss
from fluxtrain.parallel.distributed import World
from fluxtrain.parallel.parallelize import build_model
from fluxtrain.runtime.step_times import StepTimes
from fluxtrain.train.evaluation_task import evaluate_model
from fluxtrain.train.memory import sum_error
from fluxtrain.train.step import add_gradients

STEPS = 8
RUN: dict[str, Any] = {
    "preset": "micro",
    "precision": {"compute": "bfloat16", "weights": "bfloat16"},
    "schedule": {"steps": STEPS, "warmup_steps": 0},
    "parallel": {"micro_batch_size": 8},  # gradients accumulate on one rank
    "evaluation": {"every_samples": 32},
    "checkpoint": {"asynchronous": False, "memory_every_steps": 0},
    "logging": {"every_steps": 1, "metrics_port": 0},
}
KEYS = ("train_loss", "eval_loss")


def finish(paths: RunPaths, size: int = 1, crash: int = 0, **changes: Any) -> None:
    """Train on ``size`` ranks, which crash after step ``crash``."""
    in_process.train(resolve(merge(RUN, changes)), paths, size, crash)


def paths_of(folder: Path) -> RunPaths:
    return RunPaths(folder, folder, folder)


def saved(output: Path, step: int = STEPS) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint of one rank."""
    (file,) = output.glob(f"checkpoints/*{step}/*.safetensors")
    return load_file(file)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output of a run on one rank."""
    output = tmp_path_factory.mktemp("reference")
    finish(paths_of(output))
    return output


@pytest.mark.torch_range
def test_losses_are_close_to_those_of_float32_weights(tmp_path: Path) -> None:
    for weights in ("float32", "bfloat16"):
        finish(paths_of(tmp_path / weights), precision={"weights": weights}, schedule={"steps": 50})
    for key in KEYS:
        ours, theirs = (losses(tmp_path / name, key) for name in ("bfloat16", "float32"))
        assert ours == pytest.approx(theirs, rel=0.02)
        assert ours != theirs
    assert ours[50] < 0.8 * ours[min(ours)], "it learns"


@pytest.mark.parametrize("weights", ["bfloat16", "float32"])
def test_the_sum_of_gradients_is_as_exact_as_planned(weights: str) -> None:
    """Their own sum in float32 is the reference: errors of the passes themselves are not counted."""
    count = 64
    changes = {
        "precision": {"weights": weights},
        "schedule": {"global_batch_size": count},
        "parallel": {"micro_batch_size": 1},
        "data": {"num_workers": 0},
    }
    config = resolve(merge(RUN, changes))
    alone = World.alone()
    model = build_model(config, alone)
    optim.make_optimizer(model, config.optim, torch.bfloat16)  # chooses the type of gradients
    flow_loss = FlowLoss(model, config, torch.bfloat16)
    parameters = list(model.parameters())
    sums = [torch.zeros(each.shape) for each in parameters]
    for parameter, total in zip(parameters, sums, strict=True):
        parameter.register_hook(partial(add_to, total))
    shares = BatchShares.of(config, 1)
    batches = iter(training_batches(config, open_sources(config, Path()), shares, 0))
    times, encode = StepTimes(alone.device), batch_encoder(config, Path(), alone.device)
    for number in range(1, count + 1):
        add_gradients(flow_loss, encode, next(batches), count, times, number == count)
        if number in (4, 16, 64):
            found = torch.cat([gradient_of(each).flatten() for each in parameters])
            exact = torch.cat([total.flatten() for total in sums])
            planned = sum_error(config, Sharding.of(config, 1, 1), number)
            error = ((found - exact).norm() / exact.norm()).item()
            assert error == pytest.approx(planned, rel=0.3, abs=1e-6)
            assert found.norm().item() == pytest.approx(exact.norm().item(), rel=2e-3)


def add_to(total: Tensor, gradient: Tensor) -> None:
    total += gradient


def gradient_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.float()


def test_a_checkpoint_has_bfloat16_weights_and_float32_moments(reference: Path) -> None:
    tensors = saved(reference)
    for name, tensor in tensors.items():
        is_weight = name.startswith("model.")
        assert tensor.dtype == (torch.bfloat16 if is_weight else torch.float32), name
    sizes = [tensor.nbytes for name, tensor in tensors.items() if name.startswith("model.")]
    numbers = [tensor.numel() for name, tensor in tensors.items() if name.startswith("model.")]
    assert sum(sizes) == 2 * sum(numbers)


@pytest.mark.torch_range
@pytest.mark.parametrize(("size", "in_memory"), [(1, False), (1, True), (2, True)])
def test_a_killed_run_resumes_to_the_bit(
    reference: Path, tmp_path: Path, size: int, in_memory: bool
) -> None:
    volume = tmp_path / "memory"
    volume.mkdir()
    expected = paths_of(reference)
    if size > 1:
        expected = paths_of(tmp_path / "expected")
        finish(expected, size)
    paths = RunPaths(tmp_path / "run", tmp_path, tmp_path, snapshots=volume)
    every = {"every_steps": 0, "memory_every_steps": 1} if in_memory else {"every_steps": 2}
    finish(paths, size, crash=5, checkpoint=every)
    finish(paths, size, crash=0, checkpoint=every)
    assert ("from memory" in ranks.output_of(paths)) == in_memory
    for key in KEYS:
        assert losses(paths.output, key) == losses(expected.output, key)


def test_a_run_continues_on_other_numbers_of_ranks(reference: Path, tmp_path: Path) -> None:
    for size, crash in ((1, 3), (3, 5), (1, 0)):
        finish(paths_of(tmp_path), size, crash, checkpoint={"every_steps": 2})
    for key in KEYS:
        assert losses(tmp_path, key) == pytest.approx(losses(reference, key), rel=0.01)


def test_another_data_type_of_the_weights_is_another_run(reference: Path) -> None:
    config = resolve(merge(RUN, {"precision": {"weights": "float32"}, "schedule": {"steps": 9}}))
    assert in_process.finish(ranks.train_alone, config, paths_of(reference)) == [EXIT_USAGE]
    (line,) = ranks.output_of(paths_of(reference)).strip().splitlines()[-1:]
    assert "spec.run.precision.weights: got 'float32'; the checkpoint" in line
    assert "was trained with 'bfloat16'; use another --output" in line


def test_moments_in_8_bits_and_averages_resume_to_the_bit(tmp_path: Path) -> None:
    outputs = [tmp_path / name for name in "ab"]
    optim = {"name": "adamw_8bit", "ema_decay": 0.9}
    finish(paths_of(outputs[0]), optim=optim)
    finish(paths_of(outputs[1]), optim=optim, crash=5, checkpoint={"every_steps": 3})
    finish(paths_of(outputs[1]), optim=optim, checkpoint={"every_steps": 3})
    for key in KEYS:
        assert losses(outputs[0], key) == losses(outputs[1], key)
    one, two = map(saved, outputs)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_an_output_is_evaluated_continued_and_exported(reference: Path, tmp_path: Path) -> None:
    values = {"initial_weights": reference.name, "task": "evaluate"}
    for weights in ("bfloat16", "float32"):
        paths = RunPaths(tmp_path / weights, tmp_path, reference.parent)
        config = resolve(merge(RUN, {**values, "precision": {"weights": weights}}))
        assert in_process.finish(evaluate_model, config, paths) == [0], ranks.output_of(paths)
        found = json.loads((paths.output / "evaluation.json").read_text())
        last = losses(reference, "eval_loss")[STEPS]
        assert found["eval_loss"] == pytest.approx(last, rel=1e-6)
    paths = RunPaths(tmp_path / "next", tmp_path, reference.parent)
    finish(paths, initial_weights=reference.name, precision={"weights": "float32"})
    assert {each.dtype for each in saved(paths.output).values()} == {torch.float32}
    file = tmp_path / "exported.safetensors"
    assert main(["export", str(reference), "--output", str(file)]) == EXIT_OK
    exported, weights = load_file(file), saved(reference)
    assert {f"model.{name}" for name in exported} == {n for n in weights if n.startswith("model.")}
    assert all(torch.equal(tensor, weights[f"model.{n}"]) for n, tensor in exported.items())
