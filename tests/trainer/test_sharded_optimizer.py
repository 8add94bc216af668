"""The optimizer on local shards takes the same steps as torch's clipping and AdamW on DTensors."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from cluster.free_ports import free_port
from tests.trainer import ranks
from tests.trainer.full_tensor import full_tensor
from torch import Tensor, nn

from fluxtrain import optim
from fluxtrain.contract.launch import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.optim import OptimConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.distributed import World, process_group
from fluxtrain.parallelize import fully_shard

SHAPES = ((7, 3), (1,), (4, 2), (2, 5), (6,))
"""On 3 ranks none is divided evenly but the last, and three leave the third rank without a part."""
MAX_NORMS = (0.5, 1e3, 0.5, 1e3)
"""Limits of the gradient norm, of steps that clip and steps that do not."""
CONFIG = OptimConfig(learning_rate=0.05)


class Layers(nn.Module):
    """A weight of each shape."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList([torch.randn(shape) for shape in SHAPES])

    def forward(self, scale: Tensor) -> Tensor:
        return torch.stack([(weight * scale).square().sum() for weight in self.weights]).sum()


def sharded(world: World, replicas: int) -> Layers:
    layers = Layers()
    if world.size > 1:
        fully_shard(layers, mesh=world.mesh(replicas))
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


@pytest.mark.parametrize(("size", "replicas"), [(1, 1), (2, 1), (3, 1), (4, 2), (4, 4)])
def test_steps_on_shards_equal_torchs_on_dtensors(tmp_path: Path, size: int, replicas: int) -> None:
    paths = RunPaths(tmp_path, tmp_path, tmp_path)
    run = partial(compare, port=free_port(), replicas=replicas)
    config = resolve({"preset": "micro"})
    assert ranks.finish(run, config, paths, size) == [0] * size, ranks.output_of(paths)
