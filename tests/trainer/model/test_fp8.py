"""Linear layers in fp8: which ones, their products against ones computed here, and training with them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cluster.free_ports import free_port
from tests.trainer import in_process, ranks
from tests.trainer.outputs import losses
from tests.trainer.tiny_model import tiny_model
from torch import Tensor, nn

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.errors import ConfigError
from fluxtrain.model.flux import Flux
from fluxtrain.model.fp8 import (
    FNUZ,
    OCP,
    Dialect,
    Fp8Linear,
    Recipe,
    Rounded,
    product,
    rounded,
    scaled_mm,
    use_fp8,
)

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TINY = tiny_model()
RECIPES: tuple[Recipe, ...] = ("tensorwise", "rowwise")


def linear(recipe: Recipe) -> nn.Linear:
    """Return the projection of a block, in fp8, with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Flux(TINY).to(torch.bfloat16)
    use_fp8(model, recipe, CPU)
    layer = model.double_blocks[0].get_submodule("img_attn.qkv")
    assert isinstance(layer, nn.Linear)
    return layer


def dequantized(tensor: Tensor, dtype: torch.dtype, dim: int | None = None) -> Tensor:
    """Return ``tensor`` rounded to fp8, with one scale or one for each slice along ``dim``, in float64."""
    wide = tensor.double()
    largest = wide.abs().amax() if dim is None else wide.abs().amax(dim, keepdim=True)
    unit = (largest.float() / torch.finfo(dtype).max).double()
    return (wide / unit).float().to(dtype).double() * unit


def expected(recipe: Recipe, x: Tensor, weight: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the product, and the gradients of the input and the weight, as the recipe defines them."""
    if recipe == "tensorwise":
        w, xq, gq = dequantized(weight, E4M3), dequantized(x, E4M3), dequantized(g, E5M2)
        return xq @ w.T, gq @ w, gq.T @ xq
    y = dequantized(x, E4M3, 1) @ dequantized(weight, E4M3, 1).T
    grad_x = dequantized(g, E4M3, 1) @ dequantized(weight, E4M3, 0)
    return y, grad_x, dequantized(g, E4M3, 0).T @ dequantized(x, E4M3, 0)


def error(actual: Tensor, right: Tensor) -> float:
    """Return the relative error in the L2 norm."""
    return float((actual.double() - right).norm() / right.norm())


@pytest.mark.torch_range
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_three_products_are_those_of_factors_rounded_to_fp8(recipe: Recipe) -> None:
    layer = linear(recipe)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(40, layer.in_features, generator=generator).to(torch.bfloat16)
    g = torch.randn(40, layer.out_features, generator=generator).to(torch.bfloat16) * 1e-4
    x[3] *= 30  # an outlier
    x.requires_grad_()
    y = layer(x)
    y.backward(g)
    product, grad_x, grad_weight = expected(recipe, x.detach(), layer.weight.detach(), g)
    assert layer.bias is not None
    bf16 = 2**-8
    assert error(y.detach() - layer.bias.detach(), product) < 2 * bf16
    assert x.grad is not None
    assert error(x.grad, grad_x) < 2 * bf16
    assert layer.weight.grad is not None
    assert error(layer.weight.grad, grad_weight) < 2 * bf16
    exact = x.detach().double() @ layer.weight.detach().double().T
    assert error(product, exact) > 4 * bf16, "fp8 differs from bf16 by more than that"


@pytest.fixture
def torchs_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``torch._scaled_mm`` compute by itself: oneDNN's fp8 lacks types that depend on the processor."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


@pytest.mark.torch_range
@pytest.mark.usefixtures("torchs_kernel")
@pytest.mark.parametrize("dialect", [OCP, FNUZ], ids=["ocp", "fnuz"])
def test_products_equal_those_of_torchs_kernel(dialect: Dialect) -> None:
    generator = torch.Generator().manual_seed(3)
    x, w = (torch.randn(n, 64, generator=generator) for n in (32, 48))
    left, right = rounded(x, dialect.forward, None), rounded(w, dialect.forward, None)
    units = left.unit, right.unit
    kernel = torch._scaled_mm(left.values, right.values.t(), *units, out_dtype=torch.bfloat16)
    turned = Rounded(right.values.t(), right.unit)
    torch.testing.assert_close(product(left, turned, torch.bfloat16), kernel)
    for dtype in dialect:  # the largest value is represented, and the rest within half a step
        values, unit = rounded(x, dtype, None)
        assert values.double().abs().max() == torch.finfo(dtype).max
        worst = ((values.double() * unit - x).abs() / x.abs().clamp(min=float(unit))).max()
        step = 2.0 ** -(3 if "e4m3" in str(dtype) else 2)  # finfo's of e5m2fnuz was half of it
        assert worst <= step / 2 * 1.01


@pytest.mark.usefixtures("torchs_kernel")
@pytest.mark.parametrize("tokens", [1, 15, 16, 33])
def test_a_gradient_of_weights_sums_over_any_number_of_tokens(tokens: int) -> None:
    """The kernel needs a multiple of 16; a CPU's takes one scale for each tensor."""
    generator = torch.Generator().manual_seed(4)
    g, x = (torch.randn(tokens, n, generator=generator) for n in (48, 32))
    left, values = rounded(g, OCP.gradient, None), rounded(x, OCP.forward, None)
    above = Rounded(left.values.t(), left.unit)
    kernel = scaled_mm(above, values, torch.bfloat16, fast=False)
    torch.testing.assert_close(kernel, product(above, values, torch.bfloat16))


@pytest.mark.parametrize("recipe", RECIPES)
def test_zeros_stay_zeros(recipe: Recipe) -> None:
    layer = linear(recipe)
    x = torch.zeros(16, layer.in_features, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x) - layer.bias
    assert torch.equal(y, torch.zeros_like(y))
    y.backward(torch.zeros_like(y))
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert not x.grad.any()
    assert not layer.weight.grad.any()


def test_a_product_that_is_not_finite_stays_so() -> None:
    layer = linear("tensorwise")
    x = torch.ones(16, layer.in_features, dtype=torch.bfloat16)
    x[0, 0] = torch.nan
    assert not layer(x).isfinite().any(), "a scale of the whole tensor is not finite"


def test_only_the_linear_layers_of_blocks_without_modulations_are_in_fp8() -> None:
    model = Flux(TINY)
    names = [name for name, _ in model.named_parameters()]
    use_fp8(model, "tensorwise", CPU)
    assert [name for name, _ in model.named_parameters()] == names
    linears = {n: type(m).__name__ for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    converted = {name for name, kind in linears.items() if kind == "Fp8Linear"}
    # qkv, proj and two of the MLP in each stream; linear1, linear2
    per_double, per_single = 2 * 4, 2
    assert len(converted) == TINY.depth * per_double + TINY.depth_single_blocks * per_single
    assert {name for name in linears if "mod" in name or "block" not in name} & converted == set()


def gpu(architecture: str, capability: tuple[int, int]) -> SimpleNamespace:
    major, minor = capability
    return SimpleNamespace(name="a GPU", gcnArchName=architecture, major=major, minor=minor)


@pytest.mark.parametrize(
    ("hip", "architecture", "capability", "able"),
    [
        ("7.0", "gfx942:sramecc+:xnack-", (9, 4), True),
        ("7.0", "gfx950", (9, 5), True),
        ("7.0", "gfx90a:sramecc+:xnack-", (9, 0), False),
        (None, "", (9, 0), True),
        (None, "", (8, 9), True),
        (None, "", (8, 6), False),
    ],
)
def test_gpus_without_fp8_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    hip: str | None,
    architecture: str,
    capability: tuple[int, int],
    able: bool,
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    found = gpu(architecture, capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    model = Flux(TINY)
    if able:
        use_fp8(model, "rowwise", CUDA)
        (kind,) = {type(m).dialect for m in model.modules() if isinstance(m, Fp8Linear)}
        assert kind == (FNUZ if architecture.startswith("gfx942") else OCP)
        return
    with pytest.raises(ConfigError, match=r"precision\.fp8.*a GPU has no fp8 matrix products"):
        use_fp8(model, "rowwise", CUDA)


TRAINING = {
    "preset": "micro",
    "model": {"depth": 0, "depth_single_blocks": 1},
    "schedule": {"steps": 4, "warmup_steps": 0},
    "precision": {"compute": "bfloat16"},
    "parallel": {"micro_batch_size": 8},
    "evaluation": {"every_samples": 0, "at_end": False},
    "logging": {"every_steps": 1, "metrics_port": 0},
}


def train(output: Path, fp8: str, size: int = 1, **parallel: object) -> list[float]:
    """Train four steps; return their losses."""
    paths = RunPaths(output, output, output)
    run = partial(ranks.train_together, port=free_port())
    config = resolve(merge(TRAINING, {"precision": {"fp8": fp8}, "parallel": parallel}))
    assert in_process.finish(run, config, paths, size) == [0] * size, ranks.output_of(paths)
    return list(losses(output).values())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of a run in bfloat16."""
    return train(tmp_path_factory.mktemp("plain") / "run", "none")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("size", "parallel"),
    [(1, {}), (1, {"activation_checkpointing": 1.0}), (2, {})],
    ids=["plain", "recomputed", "two-ranks"],
)
def test_training_follows_bfloat16(
    plain: list[float], tmp_path: Path, recipe: Recipe, size: int, parallel: dict[str, object]
) -> None:
    found = train(tmp_path / "run", recipe, size, **parallel)
    assert found != plain
    assert found == pytest.approx(plain, rel=0.01)


@pytest.mark.torch_range
@pytest.mark.proof
@pytest.mark.filterwarnings("default")  # torch.compile has others with each torch and Python
def test_compiled_blocks_train_in_fp8(plain: list[float], tmp_path: Path) -> None:
    found = train(tmp_path / "run", "tensorwise", compile=True, activation_checkpointing=1.0)
    assert found == pytest.approx(plain, rel=0.01)


def test_a_run_is_not_continued_with_another_recipe(tmp_path: Path) -> None:
    train(tmp_path / "run", "none")
    with pytest.raises(AssertionError, match=r"spec\.run\.precision\.fp8.*was trained with 'none'"):
        train(tmp_path / "run", "rowwise")
