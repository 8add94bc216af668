"""Weights in fp8 that are rounded once a step, and gathered so, are those that each pass rounds itself."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.trainer import ranks
from tests.trainer.small_runs import merge_all
from tests.trainer.tiny_model import random_flux
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from fluxtrain import optim
from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.model.flux import Flux
from fluxtrain.model.fp8 import OCP, Fp8Linear, rounded
from fluxtrain.model.loss import FlowLoss
from fluxtrain.optim.optimizer import Optimizer
from fluxtrain.parallel.distributed import World, process_group
from fluxtrain.parallel.parallelize import (
    DTYPES,
    WeightScaling,
    build_model,
    finish_sharding,
    free_gathered,
)
from fluxtrain.parallel.sharding import local_part
from fluxtrain.state.checkpoint import training_state
from fluxtrain.train.loop import synthetic_batch

RUN: dict[str, Any] = {
    "preset": "micro",
    "model": {
        "depth": 1,
        "depth_single_blocks": 1,
        "axes_dim": [4, 6, 6],
        "num_heads": 2,
        "hidden_size": 32,  # rows that 3 ranks cannot divide evenly
    },
    "data": {"latent_size": 6, "text_length": 7},
    "optim": {"learning_rate": 0.05},
    "precision": {"compute": "bfloat16", "fp8": "tensorwise"},
}
CASES: list[dict[str, Any]] = [
    {"parallel": {"activation_checkpointing": 1.0}, "optim": {"ema_decay": 0.5}},
    {"precision": {"weights": "bfloat16"}, "optim": {"ema_decay": 0.5}},
    {"parallel": {"reshard_after_forward": False}, "optim": {"name": "schedule_free_adamw"}},
]
STEPS = 2


def layers(model: nn.Module) -> list[Fp8Linear]:
    return [module for module in model.modules() if isinstance(module, Fp8Linear)]


def made(config: RunConfig, world: World, finds_own: bool) -> tuple[Flux, Optimizer]:
    """Return a model and its optimizer; with ``finds_own`` each pass gathers and rounds whole weights."""
    model = build_model(config, world, random_flux(config.model).named_parameters())
    compute = DTYPES[config.precision.compute]
    scale = nullcontext() if not finds_own else mock.patch.object(optim, "WeightScaling")
    with scale:
        optimizer = optim.make_optimizer(model, config.optim, compute)
    assert all((layer.largest is None) == finds_own for layer in layers(model))
    return model, optimizer


def training(config: RunConfig, world: World, finds_own: bool) -> list[Tensor]:
    """Return the losses of steps and evaluations, and this rank's weights; it resumes in the middle."""
    model, optimizer = made(config, world, finds_own)
    batch = synthetic_batch(config, 5, ranks.CPU)
    generator = torch.Generator().manual_seed(world.rank)
    for tensor in (batch.mean, batch.noise, batch.txt, batch.vec):
        tensor.normal_(generator=generator)
    batch.weights.fill_(1)
    found = list[Tensor]()
    for step in range(STEPS):
        if step == STEPS // 2:
            model, optimizer = resumed(config, world, finds_own, training_state(model, optimizer))
        flow_loss = FlowLoss(model, config, DTYPES[config.precision.compute])
        losses = flow_loss(batch)
        torch.autograd.backward(losses.sum())
        optim.update(optimizer, optimizer.gradient_norm(), 1.0, torch.tensor(optim.NEVER))
        optimizer.zero_grad()
        with optimizer.evaluated(), torch.no_grad():
            found += [losses.detach(), flow_loss(batch)]
            free_gathered(model)
    is_sharded = isinstance(model, FSDPModule)
    in_fp8 = [layer.values is not None for layer in layers(model)]
    assert in_fp8 == [is_sharded and not finds_own] * len(in_fp8)
    return found + [local_part(each.detach()) for each in model.parameters()]


def resumed(
    config: RunConfig, world: World, finds_own: bool, state: dict[str, Tensor]
) -> tuple[Flux, Optimizer]:
    """Return a new model and optimizer with ``state``."""
    model, optimizer = made(config, world, finds_own)
    for name, tensor in training_state(model, optimizer).items():
        local_part(tensor).copy_(local_part(state[name]))
    optimizer.resume(STEPS // 2)
    return model, optimizer


def compare(config: RunConfig, paths: RunPaths, world: World, *, port: int) -> None:
    ranks.set_environment(world, port)
    with process_group() as joined:
        for changes in CASES:
            case = resolve(merge_all(RUN, changes))
            own, once = (training(case, joined, finds_own) for finds_own in (True, False))
            assert len({float(each.sum()) for each in own[: 2 * STEPS]}) > STEPS, "they change"
            assert all(map(torch.equal, own, once)), changes
        require_largest(joined)


def require_largest(world: World) -> None:
    """Compare the values of layers whose largest one another rank may have, or all ranks but one.

    And what is gathered of them, with ranks that have no row.
    """
    kind = type("Fp8Linear", (Fp8Linear,), {"recipe": "tensorwise", "dialect": OCP})
    torch.manual_seed(0)
    model = nn.Sequential(*(kind(5, rows) for rows in (1, 2, 4, 7)))
    weights = [layer.weight.detach().bfloat16() for layer in layers(model)]
    expected = [weight.abs().amax().float() for weight in weights]
    if world.size > 1:
        finish_sharding(fully_shard(model, mesh=world.mesh(1)))
    WeightScaling(model, torch.bfloat16)()
    found = [layer.largest for layer in layers(model)]
    assert found == expected, "numbers of one value each"
    if isinstance(model, FSDPModule):
        model.unshard()
        for layer, weight in zip(layers(model), weights, strict=True):
            right = rounded(weight, OCP.forward, None)
            assert layer.values is not None
            assert layer.values.float().equal(right.values.float())


@pytest.mark.torch_range
@pytest.mark.parametrize("size", [1, 2, 3])
def test_training_is_the_same_if_layers_find_the_largest_values(tmp_path: Path, size: int) -> None:
    ranks.finish_all(compare, tmp_path, size, resolve(RUN))
