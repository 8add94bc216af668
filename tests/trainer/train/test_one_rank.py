"""One rank computes in bfloat16 without FSDP2, and takes the steps of FSDP2's mixed precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.trainer import in_process, ranks
from tests.trainer.outputs import losses
from tests.trainer.ranks import CPU
from torch import Tensor

from fluxtrain import optim
from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.data.loader import training_batches
from fluxtrain.data.order import BatchShares
from fluxtrain.data.sources import open_sources
from fluxtrain.model.loss import FlowLoss
from fluxtrain.parallel import parallelize
from fluxtrain.parallel.distributed import World, process_group
from fluxtrain.parallel.sharding import is_sharded, local_part
from fluxtrain.runtime.step_times import StepTimes
from fluxtrain.train.step import add_gradients, update

STEPS = 8
RUN = {
    "preset": "micro",
    "precision": {"compute": "bfloat16"},
    "schedule": {"steps": STEPS, "warmup_steps": 0},
    "parallel": {"micro_batch_size": 4},  # gradients accumulate on one rank
    "evaluation": {"every_samples": 32},
    "logging": {"every_steps": 1, "metrics_port": 0},
}


def steps_of(config: RunConfig, world: World, *, sharded: bool) -> tuple[list[float], list[Tensor]]:
    """Take three steps; return losses and gradient norms, and the weights after the first."""
    vars(parallelize)["uses_fsdp"] = lambda config, num_ranks: sharded
    model, times = parallelize.build_model(config, world), StepTimes(CPU)
    flow_loss = FlowLoss(model, config, torch.bfloat16)
    optimizer = optim.make_optimizer(model, config.optim, torch.bfloat16)
    parameters = list(model.parameters())
    assert [is_sharded(each) for each in parameters] == [sharded] * len(parameters)
    assert all(each.dtype == torch.float32 for each in optimizer.weights.values())
    shares = BatchShares.of(config, world.size)
    batches = training_batches(config, open_sources(config, Path()), shares, world.rank)
    numbers, weights, bad_step = list[float](), list[Tensor](), torch.tensor(optim.NEVER)
    for step in range(1, 4):
        for number in reversed(range(shares.accumulation_steps)):
            batch = next(batches)
            each, _ = add_gradients(flow_loss, lambda b: b, batch, 16, times, number == 0)
            numbers.append(each.sum().item())
        norm, bad_step = update(optimizer, config, step, bad_step, times)
        numbers.append(norm.item())
        weights = weights or [local_part(each).clone() for each in optimizer.weights.values()]
    return numbers, weights


def compare(config: RunConfig, paths: RunPaths, world: World) -> None:
    """Compare both ways; the vectors' gradients may be added up in another order."""
    with process_group() as joined:
        alone, weights = steps_of(config, joined, sharded=False)
        numbers, expected = steps_of(config, joined, sharded=True)
        names = [name for name, _ in parallelize.empty_model(config, joined).named_parameters()]
    assert alone == pytest.approx(numbers, rel=1e-5)
    for name, mine, other in zip(names, weights, expected, strict=True):
        assert torch.equal(mine, other) or name.startswith(("time_in", "vector_in")), name


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"parallel": {"micro_batch_size": 16, "activation_checkpointing": 0.5}},
        {"precision": {"reduce": "bfloat16", "fp8": "tensorwise"}},
    ],
)
def test_one_rank_takes_the_steps_of_fsdp2(tmp_path: Path, changes: dict[str, Any]) -> None:
    paths = RunPaths(tmp_path, tmp_path, tmp_path)
    assert ranks.finish(compare, resolve(merge(RUN, changes)), paths) == [0], ranks.output_of(paths)


def finish(paths: RunPaths, size: int = 1, crash: int = 0, **checkpoint: object) -> None:
    """Train on ``size`` ranks, which crash after step ``crash``."""
    config = resolve(merge(RUN, {"checkpoint": {"asynchronous": False, **checkpoint}}))
    in_process.train(config, paths, size, crash)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output of a run on one rank."""
    output = tmp_path_factory.mktemp("reference")
    finish(RunPaths(output, output, output))
    return output


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_resumed_run_has_bit_equal_losses(
    reference: Path, tmp_path: Path, in_memory: bool
) -> None:
    volume = tmp_path / "memory"
    volume.mkdir()
    paths = RunPaths(tmp_path / "run", tmp_path, tmp_path, snapshots=volume)
    saved = (
        {"every_steps": 0, "memory_every_steps": 1}
        if in_memory
        else {"every_steps": 2, "memory_every_steps": 0}
    )
    finish(paths, crash=5, **saved)
    finish(paths, **saved)
    assert ("from memory" in ranks.output_of(paths)) == in_memory
    for key in ("train_loss", "eval_loss"):
        assert losses(paths.output, key) == losses(reference, key)


def test_a_run_continues_on_other_numbers_of_ranks(reference: Path, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, tmp_path, tmp_path)
    for size, crash in ((1, 3), (3, 5), (1, 0)):
        finish(paths, size, crash, every_steps=2)
    for key in ("train_loss", "eval_loss"):
        assert losses(paths.output, key) == pytest.approx(losses(reference, key), rel=0.01)
    files = tmp_path.glob(f"checkpoints/*{STEPS}/*.safetensors")
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert any(
        not torch.equal(tensor, tensor.bfloat16().float())
        for name, tensor in tensors.items()
        if name.startswith("model.")
    )
