"""AdamW in one launch takes torch's fused steps; rounded gradients of one micro batch change no bit.

Triton's interpreter runs the kernel here. It cuts off the bits that bfloat16 lacks, where GPUs round.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from fluxtrain import optim
from fluxtrain.contract.run.optim import OptimConfig
from fluxtrain.optim.adamw import step
from fluxtrain.parallel.compile import missing_compiler

pytestmark = pytest.mark.slow

CONFIG = OptimConfig(learning_rate=1e-2, beta2=0.95, weight_decay=0.1)
SIZES = ((37,), (129, 64), (5, 4096), (3, 7))
FACTORS = (1.0, 0.5, 1.0, 2.0)
BAD_STEP, STEPS = 3, 6
ULP = 2**-7
"""Of a bfloat16 number, relative."""


@pytest.fixture
def fused(interpreted: Callable[[str], ModuleType]) -> ModuleType:
    return interpreted("fluxtrain.optim.fused")


def zeros() -> list[Tensor]:
    return [torch.zeros(size) for size in SIZES]


@pytest.mark.parametrize("has_copies", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("misaligned", [False, True])
def test_a_launch_equals_torchs_fused_steps(
    fused: ModuleType, dtype: torch.dtype, has_copies: bool, misaligned: bool
) -> None:
    torch.manual_seed(0)
    ours = [torch.randn(size) for size in SIZES]
    theirs = [each.clone() for each in ours]
    moments, their_moments = (zeros(), zeros()), (zeros(), zeros())
    copies = [each.bfloat16() for each in ours] if has_copies else []
    kernel, taken = fused.FusedStep(FACTORS, torch.device("cpu")), torch.zeros(())
    for number in range(STEPS):
        is_bad, scale = torch.tensor(float(number == BAD_STEP)), torch.tensor(1.0 + number)
        taken += 1 - is_bad
        gradients = [gradient(size, dtype, misaligned) for size in SIZES]
        before = [each.clone() for each in (*ours, *moments[0], *moments[1], *copies)]
        kernel.take((ours, gradients, *moments), copies, CONFIG, 1e-2, taken, scale, is_bad)
        if number == BAD_STEP:
            after = (*ours, *moments[0], *moments[1], *copies)
            assert all(map(torch.equal, before, after))
        for index, factor in enumerate(FACTORS):
            of_one = (
                [theirs[index]],
                [gradients[index].float()],
                *([each[index]] for each in their_moments),
            )
            step(of_one, taken, CONFIG, 1e-2 * factor, scale, is_bad)
    for one, two in ((ours, theirs), *zip(moments, their_moments, strict=True)):
        for own, other in zip(one, two, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
    for copy, weight in zip(copies, ours, strict=False):
        torch.testing.assert_close(copy.float(), weight, rtol=ULP, atol=0)


@pytest.mark.parametrize("ema", [None, 0.5])
@pytest.mark.parametrize("accumulates", [True, False])
def test_the_optimizer_takes_the_same_steps_by_the_kernel(
    fused: ModuleType, monkeypatch: pytest.MonkeyPatch, accumulates: bool, ema: float | None
) -> None:
    config = CONFIG.model_copy(update={"ema_decay": ema})
    torch.manual_seed(0)
    one, two = nn.Linear(48, 40), nn.Linear(48, 40)
    two.load_state_dict(one.state_dict())
    optimizers = []
    for model, is_fused in ((one, False), (two, True)):
        monkeypatch.setattr("fluxtrain.optim.adamw._fused", fused.FusedStep)
        factors = {"weight": 1.0, "bias": 0.5}.__getitem__
        made = optim.make_optimizer(
            *(model, config, torch.bfloat16, factors),
            accumulates=accumulates,
            fused=is_fused,
        )
        made.resume(2)
        optimizers.append(made)
    for number in range(STEPS):
        gradients = [torch.randn(each.shape).bfloat16().float() for each in one.parameters()]
        is_bad = torch.tensor(float(number == BAD_STEP))
        for model, optimizer in zip((one, two), optimizers, strict=True):
            for parameter, values in zip(model.parameters(), gradients, strict=True):
                parameter.grad = values.to(torch.float32 if accumulates else torch.bfloat16)
            optimizer.step(torch.tensor(1.5), is_bad)
    for first, second in zip(one.parameters(), two.parameters(), strict=True):
        pair = optimizers[0].weights[first], optimizers[1].weights[second]
        torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-6)
        assert second.dtype == torch.bfloat16
        torch.testing.assert_close(second.float(), pair[1], rtol=ULP, atol=0)
        judged = optimizers[0].judged(first), optimizers[1].judged(second)
        torch.testing.assert_close(*judged, rtol=1e-5, atol=1e-6)


def gradient(size: tuple[int, ...], dtype: torch.dtype, misaligned: bool) -> Tensor:
    """Return one that is contiguous; ``misaligned`` by one value, as part of a larger tensor may be."""
    count = torch.Size(size).numel()
    return torch.randn(count + 1).to(dtype)[int(misaligned) :][:count].view(size)


@pytest.mark.computes
def test_gradients_of_one_micro_batch_stay_rounded_and_change_no_bit() -> None:
    torch.manual_seed(0)
    one, two = nn.Linear(64, 48), nn.Linear(64, 48)
    two.load_state_dict(one.state_dict())
    optimizers = [
        optim.make_optimizer(model, CONFIG, torch.bfloat16, accumulates=accumulates)
        for model, accumulates in ((one, True), (two, False))
    ]
    for _ in range(4):
        x, norms = torch.randn(8, 64).bfloat16(), []
        for model, optimizer in zip((one, two), optimizers, strict=True):
            model(x).square().mean().backward()
            norms.append(optimizer.gradient_norm())
            never = torch.tensor(optim.NEVER)
            optim.update(optimizer, norms[-1], 1e-3, never)
        torch.testing.assert_close(*norms, rtol=1e-6, atol=0)
        dtypes = [each.weight.grad.dtype for each in (one, two) if each.weight.grad is not None]
        assert dtypes == [torch.float32, torch.bfloat16]
        for optimizer in optimizers:
            optimizer.zero_grad()
    first, second = (list(each.weights.values()) for each in optimizers)
    assert all(map(torch.equal, first, second))


def test_other_optimizers_keep_gradients_in_float32() -> None:
    model = nn.Linear(4, 4)
    config = OptimConfig(name="lion", learning_rate=1e-3)
    optim.make_optimizer(model, config, torch.bfloat16, accumulates=False)
    model(torch.randn(2, 4).bfloat16()).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == torch.float32


@pytest.mark.parametrize(("capability", "missing"), [((6, 1), True), ((9, 0), False)])
def test_a_gpu_that_triton_lacks_has_torchs_step(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], missing: bool
) -> None:
    pytest.importorskip("triton", reason="Triton exists on Linux only")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setenv("CC", "true")  # a program that exists
    reason = missing_compiler(torch.device("cuda"))
    assert reason == ("a GPU of compute capability 7.0 is missing" if missing else None)


def test_a_rank_that_owns_no_parameter_takes_the_step() -> None:
    optimizer = optim.make_optimizer(nn.ParameterList([torch.empty(0, 4)]), CONFIG)
    optimizer.step(torch.tensor(1.0), torch.tensor(0.0))
    assert optimizer.steps_taken == 1
