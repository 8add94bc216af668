"""Each optimizer takes the steps of its author's package, AdamW those of torch's.

Prodigy in float64: its first estimates are differences of nearly equal weights, and rounding grows with them.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.training_utils import EMAModel
from lion_pytorch import Lion
from prodigyopt import Prodigy
from schedulefree import AdamWScheduleFree
from torch import nn
from transformers.optimization import Adafactor

from fluxtrain import optim
from fluxtrain.contract.run.optim import OptimConfig
from fluxtrain.optim.adamw import DynamicCode, code_book

STEPS = 50
SHAPES = ((7, 3), (4, 16), (5,), (3, 6))
ZERO = 3
"""The weight that begins at zero, as an adapter's way up."""
PRODIGY = {"name": "prodigy", "learning_rate": 1.0}


def weights(dtype: torch.dtype) -> nn.ParameterList:
    torch.manual_seed(0)
    values = [0.1 * torch.randn(shape, dtype=dtype) for shape in SHAPES]
    values[ZERO].zero_()
    return nn.ParameterList(values)


def set_gradients(model: nn.ParameterList, step: int) -> None:
    """Set those of a bowl whose middle is at 0.3, with noise."""
    generator = torch.Generator().manual_seed(step)
    for each in model:
        noise = torch.randn(each.shape, generator=generator)
        each.grad = (each.detach() - 0.3 + 0.1 * noise).to(each.dtype)


def prodigy(**arguments: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: Prodigy(parameters, betas=(0.9, 0.999), weight_decay=0.1, **arguments)


CASES: dict[str, tuple[dict[str, Any], Callable[[Any], torch.optim.Optimizer]]] = {
    "lion": (
        {"name": "lion", "learning_rate": 1e-2, "beta2": 0.99},
        lambda parameters: Lion(parameters, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1),
    ),
    "adafactor": (
        {"name": "adafactor", "learning_rate": 1e-2},
        lambda parameters: Adafactor(
            parameters, lr=1e-2, weight_decay=0.1, scale_parameter=False, relative_step=False
        ),
    ),
    "prodigy": ({**PRODIGY, "beta2": 0.999}, prodigy()),
    "prodigy of a half, with d_coef": (
        {**PRODIGY, "learning_rate": 0.5, "beta2": 0.999, "prodigy": {"d_coef": 2.0}},
        prodigy(lr=0.5, d_coef=2.0),
    ),
    "prodigy as its author advises": (
        {
            **PRODIGY,
            "beta2": 0.999,
            "prodigy": {
                "bias_correction": True,
                "safeguard_warmup": True,
                "growth_rate": 1.5,
                "d0": 1e-4,
            },
        },
        prodigy(use_bias_correction=True, safeguard_warmup=True, growth_rate=1.5, d0=1e-4),
    ),
    "schedule-free": (
        {"name": "schedule_free_adamw", "learning_rate": 1e-2, "beta2": 0.999},
        lambda parameters: AdamWScheduleFree(
            parameters, lr=1e-2, betas=(0.9, 0.999), weight_decay=0.1, foreach=False
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_fifty_steps_equal_the_authors(case: str) -> None:
    values, make = CASES[case]
    dtype = torch.float64 if values["name"] == "prodigy" else torch.float32
    ours, theirs = weights(dtype), weights(dtype)
    one = optim.make_optimizer(ours, OptimConfig(**values), dtype)
    two = make(theirs.parameters())
    begin_training = getattr(two, "train", lambda: None)
    begin_training()
    for step in range(STEPS):
        for model in (ours, theirs):
            set_gradients(model, step)
        one.step(torch.tensor(1.0), torch.tensor(0.0))
        two.step()
        require_equal(ours, theirs)
    if case == "schedule-free":  # the averages are what is evaluated, and saved
        two.eval()  # type: ignore[attr-defined]
        with one.evaluated():
            require_equal(ours, theirs)
        saved = [one.weights[each] for each in ours.parameters()]
        require_equal(saved, theirs)
        assert not torch.equal(saved[0], ours[0])
    assert not torch.allclose(ours[0], weights(dtype)[0], atol=1e-3)
    if "d" in two.param_groups[0]:
        assert one.step_size.item() == pytest.approx(two.param_groups[0]["d"], rel=1e-5)


@pytest.mark.parametrize("decay", [0.5, 0.999])
def test_the_moving_average_is_diffusers(decay: float) -> None:
    model = weights(torch.float32)
    optimizer = optim.make_optimizer(model, OptimConfig(learning_rate=0.01, ema_decay=decay))
    theirs = EMAModel(model.parameters(), decay=decay)
    for step in range(STEPS):
        set_gradients(model, step)
        optimizer.step(torch.tensor(1.0), torch.tensor(0.0))
        theirs.step(model.parameters())
        averages = [optimizer.judged(each) for each in model.parameters()]
        require_equal(averages, theirs.shadow_params)
    before = [each.detach().clone() for each in model]
    assert not torch.allclose(before[0], averages[0])
    with optimizer.evaluated():
        require_equal(model, theirs.shadow_params)
    assert all(torch.equal(one, two) for one, two in zip(model, before, strict=True))


@pytest.mark.parametrize("changes", [{"ema_decay": 0.5}, {"name": "schedule_free_adamw"}], ids=str)
def test_an_error_in_an_evaluation_leaves_the_weights_as_they_were(changes: dict[str, Any]) -> None:
    model = weights(torch.float32)
    optimizer = optim.make_optimizer(model, OptimConfig(learning_rate=0.01, **changes))
    for step in range(3):
        set_gradients(model, step)
        optimizer.step(torch.ones(()), torch.zeros(()))
    before = [each.detach().clone() for each in model]

    def fail() -> None:
        with optimizer.evaluated():
            assert not all(map(torch.equal, before, model))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert all(map(torch.equal, before, model))


def test_an_average_does_not_move_without_a_step() -> None:
    model = weights(torch.float32)
    optimizer = optim.make_optimizer(model, OptimConfig(learning_rate=0.01, ema_decay=0.5))
    set_gradients(model, 0)
    optimizer.step(torch.tensor(1.0), torch.tensor(0.0))
    set_gradients(model, 1)
    average = optimizer.judged(model[0]).clone()
    model[0].data.fill_(3.0)
    optimizer.step(torch.tensor(1.0), torch.tensor(1.0))
    assert torch.equal(optimizer.judged(model[0]), average)


FACTORS = (1.0, 16.0, 0.5, 16.0)


@pytest.mark.parametrize("case", ["adamw", "lion", "adafactor", "schedule-free"])
def test_factors_of_the_learning_rate_are_the_authors_groups(case: str) -> None:
    adamw = {"name": "adamw", "learning_rate": 1e-2}, torch_adamw
    values, make = {**CASES, "adamw": adamw}[case]
    ours, theirs = weights(torch.float32), weights(torch.float32)
    of_each = {str(number): factor for number, factor in enumerate(FACTORS)}
    config = OptimConfig(**values)
    one = optim.make_optimizer(ours, config, factor_of=of_each.__getitem__)
    rates = [config.learning_rate * factor for factor in FACTORS]
    two = make([{"params": [each], "lr": rate} for each, rate in zip(theirs, rates, strict=True)])
    begin_training = getattr(two, "train", lambda: None)
    begin_training()
    for step in range(10):
        for model in (ours, theirs):
            set_gradients(model, step)
        one.step(torch.tensor(1.0), torch.tensor(0.0))
        two.step()
        require_equal(ours, theirs)


def torch_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)


def require_equal(ours: Any, theirs: Any) -> None:
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.detach(), two.detach(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("is_signed", [True, False])
def test_codes_stand_for_the_nearest_numbers(is_signed: bool) -> None:
    book = code_book(is_signed)
    assert len(book.unique()) == 256
    assert book.max() == 1
    assert book[-2].item() == pytest.approx(1 - 0.9 / (128 if is_signed else 256), abs=1e-6)
    assert book.min().item() == pytest.approx(-book[-2].item() if is_signed else 0.0)
    assert book[book > 0].min().item() == pytest.approx(5.5e-7 if is_signed else 3.25e-7)
    values = torch.randn(5, 600) * torch.logspace(-9, 3, 5)[:, None]
    values[0, :300] = 0
    values = values if is_signed else values.square()
    code = DynamicCode(is_signed, torch.device("cpu"))
    codes, scales = code.quantized(values)
    assert (codes.dtype, codes.shape, scales.shape) == (torch.uint8, (5, 600), (5, 3))
    found = code.dequantized(codes, scales)
    for row, column in ((0, 0), (0, 299), (1, 255), (2, 256), (4, 599)):
        scale = values[row, column // 256 * 256 :][:256].abs().max()
        nearest = (book * scale - values[row, column]).abs().min()
        error = (found[row, column] - values[row, column]).abs()
        assert error.item() == pytest.approx(nearest.item(), rel=1e-3, abs=1e-12)


def test_moments_in_8_bits_are_those_of_adamw_but_for_their_rounding() -> None:
    shapes = (8, 512), (4, 300), (300,), (300, 4)
    torch.manual_seed(0)
    ours, theirs = (
        nn.ParameterList(
            0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in shapes
        )
        for _ in range(2)
    )
    config = OptimConfig(name="adamw_8bit", learning_rate=1e-2)
    one = optim.make_optimizer(ours, config)
    two = torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    before = [each.detach().clone() for each in ours]
    for step in range(STEPS):
        for model in (ours, theirs):
            set_gradients(model, step)
        one.step(torch.tensor(1.0), torch.tensor(0.0))
        two.step()
        if step == 0:
            require_equal(ours, theirs)
    require_equal(ours[2:], theirs[2:])
    for index in (0, 1):
        moved = (theirs[index] - before[index]).norm()
        assert (ours[index] - theirs[index]).norm() < 0.02 * moved
        assert not torch.allclose(ours[index], theirs[index], rtol=1e-5)
    state = one.state[ours[0]]
    bytes_of = {name: tensor.nbytes / ours[0].numel() for name, tensor in state.items()}
    assert sum(bytes_of.values()) == 2 * (1 + 4 / 256) == config.state_bytes


def test_a_step_with_bad_gradients_leaves_moments_in_8_bits_as_they_are() -> None:
    model = nn.ParameterList([torch.randn(4, 512)])
    optimizer = optim.make_optimizer(model, OptimConfig(name="adamw_8bit"))
    set_gradients(model, 0)
    optimizer.step(torch.tensor(1.0), torch.tensor(0.0))
    state = {name: tensor.clone() for name, tensor in optimizer.state[model[0]].items()}
    model[0].grad = torch.full((4, 512), torch.nan)
    optimizer.step(torch.tensor(1.0), torch.tensor(1.0))
    assert all(torch.equal(optimizer.state[model[0]][name], value) for name, value in state.items())


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


def test_a_step_does_not_import_the_compiler() -> None:
    code = """
import sys, torch
from fluxtrain import optim
from fluxtrain.contract.run.optim import OptimConfig
model = torch.nn.Linear(2, 2)
optimizer = optim.make_optimizer(model, OptimConfig())
torch.autograd.backward(model(torch.ones(2)).sum())
optim.update(optimizer, optimizer.gradient_norm(), 1.0, torch.tensor(optim.NEVER))
optimizer.zero_grad()
assert [each.grad for each in model.parameters()] == [None, None]
assert "torch._dynamo" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


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
