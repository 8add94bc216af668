"""AdamW compared with torch's, and gradient clipping."""

import math

import pytest
import torch
from torch import nn

from fluxtrain import optim
from fluxtrain.contract.run.optim import OptimConfig


def test_adamw_has_mlperfs_hyperparameters() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    config, optimizer = OptimConfig(), optim.make_optimizer(model, OptimConfig())
    assert (config.beta1, config.beta2, config.epsilon, config.weight_decay) == (
        0.9,
        0.95,
        1e-8,
        0.1,
    )
    assert len(optimizer.param_groups[0]["params"]) == 4


def test_an_update_equals_torchs_own() -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Linear(4, 4), nn.Linear(4, 4)
    theirs.load_state_dict(ours.state_dict())
    config = OptimConfig(learning_rate=0.1)
    one = optim.make_optimizer(ours, config)
    two = torch.optim.AdamW(
        theirs.parameters(), lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True
    )
    for _ in range(3):
        for model, optimizer in ((ours, one), (theirs, two)):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().sum().backward()
        one.step(torch.tensor(1.0), torch.tensor(0.0))
        two.step()
    assert all(
        torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
    )


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_nothing_is_updated_after_a_norm_that_is_not_finite(value: float) -> None:
    parameter = nn.Parameter(torch.ones(5))
    optimizer = optim.make_optimizer(nn.ParameterList([parameter]), OptimConfig(learning_rate=0.1))
    bad, states = torch.tensor(optim.NEVER), list[list[torch.Tensor]]()
    for step, number in enumerate((1.0, value, 1.0, math.nan), start=1):
        parameter.grad = torch.tensor([1.0, 2.0, number, 4.0, 5.0])
        norm = optimizer.gradient_norm()
        bad = optim.first_bad_step(bad, norm, step)
        optim.update(optimizer, norm, 1.0, bad)
        kept = parameter, optimizer.steps_taken, *optimizer.state[parameter].values()
        states.append([tensor.detach().clone() for tensor in kept])
        assert bad.item() == (optim.NEVER if step == 1 else 2)
    assert not torch.equal(states[0][0], torch.ones(5))
    for later in states[1:]:
        assert all(torch.equal(a, b) for a, b in zip(states[0], later, strict=True))
