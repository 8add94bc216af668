"""The optimizer on local shards takes the same steps as torch's clipping and AdamW on DTensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.trainer import ranks
from tests.trainer.numerics.full_tensor import full_tensor
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close

from fluxtrain import optim
from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.optim import OptimConfig, ProdigyConfig
from fluxtrain.optim.optimizer import Optimizer
from fluxtrain.parallel.distributed import World, process_group
from fluxtrain.parallel.parallelize import finish_sharding
from fluxtrain.parallel.sharding import local_part
from fluxtrain.state.checkpoint import training_state

SHAPES = ((7, 3), (1,), (4, 2), (2, 5), (6,), (5, 300))
"""The last is wide enough for moments in 8 bits. On 3 ranks none is divided evenly but the fourth, and three
leave the third rank without a part."""
MAX_NORMS = (0.5, 1e3, 0.5, 1e3)
"""Limits of the gradient norm, of steps that clip and steps that do not."""
CONFIG = OptimConfig(learning_rate=0.05)
OTHERS = (
    OptimConfig(name="adamw", learning_rate=0.05, ema_decay=0.7),
    OptimConfig(name="adamw_8bit", learning_rate=0.05),
    OptimConfig(name="adafactor", learning_rate=0.05),
    OptimConfig(name="lion", learning_rate=0.05),
    OptimConfig(name="prodigy", learning_rate=1.0, prodigy=ProdigyConfig(d0=1e-3)),
    OptimConfig(name="schedule_free_adamw", learning_rate=0.05),
)


class Layers(nn.Module):
    """A weight of each shape."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        *narrow, wide = (torch.randn(shape) for shape in SHAPES)
        # the gradient of the wide one does not outweigh others'
        self.weights = nn.ParameterList([*narrow, 0.1 * wide])

    def forward(self, scale: Tensor) -> Tensor:
        return torch.stack([(weight * scale).square().sum() for weight in self.weights]).sum()


def sharded(world: World, replicas: int) -> Layers:
    layers = Layers()
    if world.size > 1:
        finish_sharding(fully_shard(layers, mesh=world.mesh(replicas)))
    return layers


def compare(config: RunConfig, paths: RunPaths, world: World, *, port: int, replicas: int) -> None:
    """Take steps in both ways; every rank compares norms, weights and moments."""
    ranks.set_environment(world, port)
    with process_group() as joined:
        ours, theirs = sharded(joined, replicas), sharded(joined, replicas)
        one = optim.make_optimizer(ours, CONFIG)
        two = torch.optim.AdamW(
            theirs.parameters(), lr=0.05, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
        )
        never = torch.tensor(optim.NEVER)
        for step, max_norm in enumerate(MAX_NORMS, start=1):
            for model in (ours, theirs):
                model.zero_grad()
                model(torch.tensor(float(step + joined.rank))).backward()
            norm = one.gradient_norm()
            expected = full_tensor(nn.utils.clip_grad_norm_(theirs.parameters(), max_norm))
            torch.testing.assert_close(norm, expected)
            optim.update(one, norm, max_norm, never)
            two.step()
            assert 1.0 < norm.item() < 1e3
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(full_tensor(mine), full_tensor(other))
            for name, moment in one.state[mine].items():
                torch.testing.assert_close(full_tensor(moment), full_tensor(two.state[other][name]))
        assert one.steps_taken.item() == len(MAX_NORMS)


def follow(config: RunConfig, paths: RunPaths, world: World, *, port: int) -> None:
    """Take steps with every optimizer on shards, continued in the middle, and on whole weights."""
    ranks.set_environment(world, port)
    never, limit = torch.tensor(optim.NEVER), 2.0
    with process_group() as joined:
        for values in OTHERS:
            ours, theirs = sharded(joined, 1), Layers()
            one, two = (optim.make_optimizer(model, values) for model in (ours, theirs))
            for step in range(1, 7):
                ours.zero_grad()
                ours(torch.tensor(0.1 * (step + joined.rank))).backward()
                for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                    assert mine.grad is not None
                    other.grad = full_tensor(mine.grad).clone()
                for optimizer in (one, two):
                    optim.update(optimizer, optimizer.gradient_norm(), limit, never)
                with one.evaluated(), two.evaluated():
                    require_equal(ours, theirs)
                require_equal(ours, theirs)
                if step == 3:
                    ours, one = continued(joined, values, ours, one)
            assert_close(one.step_size, two.step_size)


def require_equal(ours: Layers, theirs: Layers) -> None:
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_close(full_tensor(mine.detach()), other.detach())


def continued(
    world: World, values: OptimConfig, model: Layers, optimizer: Optimizer
) -> tuple[Layers, Optimizer]:
    """Return a new model and optimizer that continue with the training state of these."""
    new = sharded(world, 1)
    with torch.no_grad():
        for parameter in new.parameters():
            local_part(parameter).fill_(7.0)
    other = optim.make_optimizer(new, values)
    state = training_state(model, optimizer)
    for name, tensor in training_state(new, other).items():
        local_part(tensor).copy_(local_part(state[name]))
    other.resume(int(optimizer.steps_taken.item()))
    for name, tensor in training_state(new, other).items():
        assert torch.equal(local_part(tensor), local_part(state[name]))
    return new, other


@pytest.mark.torch_range
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_optimizer_takes_the_same_steps_on_shards_and_when_continued(
    tmp_path: Path, size: int
) -> None:
    ranks.finish_all(follow, tmp_path, size)


@pytest.mark.torch_range
@pytest.mark.parametrize(("size", "replicas"), [(1, 1), (2, 1), (3, 1), (4, 2), (4, 4)])
def test_steps_on_shards_equal_torchs_on_dtensors(tmp_path: Path, size: int, replicas: int) -> None:
    ranks.finish_all(compare, tmp_path, size, replicas=replicas)
