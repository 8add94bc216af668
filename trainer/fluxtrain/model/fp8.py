"""The blocks' linear layers with their three matrix products in fp8.

Weights stay in the compute dtype, in which FSDP2 gathers them; each product rounds its two factors, with
scales of their largest values (dynamic scaling). With one scale a tensor those of weights are found once a
step (`parallel.parallelize.WeightScaling`). Modulations, embeddings and the last layer are no fp8.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the usual name)

from fluxtrain.contract.run.precision import FP8_MULTIPLE
from fluxtrain.errors import ConfigError
from fluxtrain.model.flux import Flux
from fluxtrain.model.layers import BLOCKS

Recipe = Literal["tensorwise", "rowwise"]
_LAYERS = ("qkv", "proj", "img_mlp.0", "img_mlp.2", "txt_mlp.0", "txt_mlp.2", "linear1", "linear2")
_SMALLEST = 1e-12
"""Least largest value that a scale is made for: that of zeros is finite."""
_OLDEST_CUDA = (8, 9)
_ROCM = ("gfx94", "gfx95", "gfx12")
_ROCM_FNUZ = "gfx94"
"""MI300: its fp8 has no negative zero, and half the range of OCP's."""


class Dialect(NamedTuple):
    """The two fp8 types of a GPU."""

    forward: torch.dtype
    """Three bits of mantissa: values and weights; with a scale for each row also gradients."""
    gradient: torch.dtype
    """Two bits of mantissa, a larger range."""


OCP = Dialect(torch.float8_e4m3fn, torch.float8_e5m2)
FNUZ = Dialect(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


class Rounded(NamedTuple):
    """A matrix in fp8: ``values`` times ``unit``."""

    values: Float[Tensor, "rows columns"]
    unit: Tensor
    """Float32: one number, or one for each row or column."""


def rounded(
    matrix: Float[Tensor, "rows columns"],
    dtype: torch.dtype,
    dim: int | None,
    largest: Tensor | None = None,
) -> Rounded:
    """Return ``matrix`` in fp8, with one scale, or one for each slice along ``dim``.

    A scale maps the largest absolute value, ``largest`` if known, to the largest of ``dtype``; NaN and
    infinity give NaN.
    """
    wide, limit = matrix.float(), torch.finfo(dtype).max
    if largest is None:
        largest = wide.abs().amax() if dim is None else wide.abs().amax(dim, keepdim=True)
    unit = unit_of(largest, dtype)
    return Rounded((wide / unit).clamp(-limit, limit).to(dtype), unit)


def unit_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what the largest value of ``dtype`` stands for, by the ``largest`` absolute value."""
    return largest.clamp(min=_SMALLEST) / torch.finfo(dtype).max


def product(
    left: Rounded,
    right: Rounded,
    dtype: torch.dtype,
    fast: bool = False,
    bias: Tensor | None = None,
) -> Float[Tensor, "m n"]:
    """Return the matrix product of ``left`` (m x k) and ``right`` (k x n), plus ``bias`` (n), in ``dtype``.

    On a GPU the matrix units compute it; ``fast`` lets those of NVIDIA add with less precision. On a CPU the
    factors are multiplied in float32, in which each product of two numbers is exact.
    """
    if left.values.is_cuda:
        return scaled_mm(left, right, dtype, fast, bias)
    y = (left.values.float() @ right.values.float()) * left.unit * right.unit
    return (y if bias is None else y + bias).to(dtype)


def scaled_mm(
    left: Rounded, right: Rounded, dtype: torch.dtype, fast: bool, bias: Tensor | None = None
) -> Tensor:
    """Return the product by torch's fp8 kernel: the left factor by rows, the right one by columns."""
    missing = -left.values.shape[1] % FP8_MULTIPLE  # of tokens, whose number may be any
    a, b = left.values, right.values.t()
    if missing:
        a, b = (F.pad(x.view(torch.uint8), (0, missing)).view(x.dtype) for x in (a, b))
    multiplied: Tensor = torch._scaled_mm(
        *(a.contiguous(), b.contiguous().t(), left.unit, right.unit, bias),
        out_dtype=dtype,
        use_fast_accum=fast,
    )
    return multiplied


class _Product(torch.autograd.Function):
    """Values (tokens x in) times weights (out x in), transposed, plus a bias; and the gradients' products.

    For the recipe tensorwise ``largest`` is the weights' largest absolute value if known, in float32, and
    ``values`` are the weights if they are rounded: the first tensor has only their gradient then.
    Also returns a float32 zero. If ``is_told``, its gradient is the largest absolute value of the other's.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        largest: Tensor | None,
        values: Tensor | None,
        recipe: Recipe,
        dialect: Dialect,
        is_told: bool,
    ) -> tuple[Float[Tensor, "tokens out"], Tensor]:
        ctx.recipe, ctx.dialect, ctx.is_told = recipe, dialect, is_told
        dim = None if recipe == "tensorwise" else 1
        if dim is None and largest is None:
            largest = weight.float().abs().amax()
        left = rounded(x, dialect.forward, dim)
        right = _rounded_weight(weight, values, dialect.forward, dim, largest)
        # with one scale the gradient of the weights needs the same rounded values: half the memory
        kept = (values, largest, *left) if dim is None else (values, x)
        ctx.save_for_backward(weight, *kept)
        y = product(left, _transposed(right), x.dtype, fast=True, bias=bias)
        return y, x.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g, largest), (weight, values, *saved) = gradients, ctx.saved_tensors
        forward, gradient = ctx.dialect
        if ctx.recipe == "tensorwise":
            left = rounded(g, gradient, None, largest if ctx.is_told else None)
            of_weight, *of_inputs = saved
            inputs, above = Rounded(*of_inputs), _transposed(left)
            right = _rounded_weight(weight, values, forward, None, of_weight)
        else:  # a scale for each slice of the dimension that is summed over
            left, inputs = rounded(g, forward, 1), rounded(saved[0], forward, 0)
            right, above = rounded(weight, forward, 0), _transposed(rounded(g, forward, 0))
        grad_x, grad_weight = product(left, right, g.dtype), product(above, inputs, weight.dtype)
        grad_bias = g.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None, None, None, None


def _rounded_weight(
    weight: Tensor,
    values: Tensor | None,
    dtype: torch.dtype,
    dim: int | None,
    largest: Tensor | None,
) -> Rounded:
    if values is None or largest is None:
        return rounded(weight, dtype, dim, largest)
    return Rounded(values, unit_of(largest, dtype))


def _transposed(matrix: Rounded) -> Rounded:
    return Rounded(matrix.values.t(), matrix.unit.t())


class Fp8Linear(nn.Linear):
    """A linear layer whose three products are in fp8; the bias is added before the first is rounded."""

    recipe: ClassVar[Recipe]
    dialect: ClassVar[Dialect]
    largest: Tensor | None = None
    """Float32, the largest absolute value of the weight; None: each forward pass finds what it needs."""
    values: Float[Tensor, "out in"] | None = None
    """The weight in fp8 while it is gathered; None: each pass rounds it."""

    def forward(self, x: Float[Tensor, "... in"]) -> Float[Tensor, "... out"]:
        return self.output(x, self.bias, is_told=False)[0]

    def output(
        self, x: Float[Tensor, "... in"], bias: Tensor, is_told: bool
    ) -> tuple[Float[Tensor, "... out"], Tensor]:
        """Return x weight^T + ``bias``, and a zero.

        If ``is_told``, the zero's gradient must be the largest absolute value of the gradient of the output.
        """
        flat = x.reshape(-1, x.shape[-1])
        scaling = self.largest, self.values, self.recipe, self.dialect
        y, told = _Product.apply(flat, self.weight, bias, *scaling, is_told)
        return y.reshape(*x.shape[:-1], -1), told


def use_fp8(model: Flux, recipe: Recipe, device: torch.device) -> None:
    """Make the blocks' linear layers `Fp8Linear`; parameters and their names stay.

    Raises ConfigError if ``device`` is a GPU without fp8.
    """
    _require_fp8(recipe, device)
    fixed = {"recipe": recipe, "dialect": dialect_of(device)}
    kind = type("Fp8Linear", (Fp8Linear,), fixed)
    for name, module in model.named_modules():
        if is_in_fp8(name):
            module.__class__ = kind


def is_in_fp8(name: str) -> bool:
    """Return whether the layer ``name`` is one that `use_fp8` changes."""
    return name.startswith(BLOCKS) and name.endswith(tuple(f".{layer}" for layer in _LAYERS))


def dialect_of(device: torch.device) -> Dialect:
    """Return the fp8 types of ``device``; OCP's on a CPU."""
    is_fnuz = device.type == "cuda" and torch.version.hip and _rocm(device).startswith(_ROCM_FNUZ)
    return FNUZ if is_fnuz else OCP


def _require_fp8(recipe: Recipe, device: torch.device) -> None:
    if device.type != "cuda":
        return
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        is_able = _rocm(device).startswith(_ROCM)
    else:
        is_able = (properties.major, properties.minor) >= _OLDEST_CUDA
    if not is_able:
        message = f"{properties.name} has no fp8 matrix products; use none"
        raise ConfigError("spec.run.precision.fp8", recipe, message)


def _rocm(device: torch.device) -> str:
    """Return the architecture of an AMD GPU, such as gfx942:sramecc+:xnack-."""
    return str(torch.cuda.get_device_properties(device).gcnArchName)


# Frozen weights in 8 bits: a value in fp8 (e4m3) and, for each row, a power of two that multiplies
# it.
#
# A product with them needs no fp8 hardware: values become the compute dtype, in which they are
# exact, and so are the powers of two. Nothing of the compute dtype is kept for the backward pass.


UNIT = "unit"
"""Name of the rows' powers of two."""
STORAGE = torch.float8_e4m3fn
_LARGEST = torch.finfo(STORAGE).max


def quantized(
    weight: Float[Tensor, "out in"],
) -> tuple[Float[Tensor, "out in"], Float[Tensor, " out"]]:
    """Return ``weight`` in fp8, and the float32 power of two of each row; their product is close to it.

    The largest value of a row is the largest of fp8 or up to half of it.
    """
    wide = weight.float()
    largest = wide.abs().amax(dim=1)
    exponent = torch.ceil(torch.log2(largest / _LARGEST)).clamp(min=-100)
    unit = torch.where(largest > 0, torch.exp2(exponent), 1.0)
    return (wide / unit[:, None]).clamp(-_LARGEST, _LARGEST).to(STORAGE), unit


class _FrozenProduct(torch.autograd.Function):
    """x times frozen weights, transposed; the backward pass converts the weights again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, unit: Tensor, bias: Tensor | None
    ) -> Float[Tensor, "... out"]:
        ctx.save_for_backward(weight, unit)
        y = F.linear(x, weight.to(x.dtype)).mul_(unit.to(x.dtype))
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None]:
        (g,), (weight, unit) = gradients, ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        return (g * unit.to(g.dtype)) @ weight.to(g.dtype), None, None, None


def base_output(module: nn.Linear, x: Tensor, bias: Tensor | None) -> Float[Tensor, "... out"]:
    """Return x W^T + bias with the frozen weight of ``module``."""
    unit = getattr(module, UNIT, None)
    if unit is None:
        return F.linear(x, module.weight, bias)
    y: Tensor = _FrozenProduct.apply(x, module.weight, unit, bias)
    return y


@torch.no_grad()
def base_weight(module: nn.Linear, dtype: torch.dtype) -> Float[Tensor, "out in"]:
    """Return the frozen weight of ``module`` in ``dtype``."""
    unit = getattr(module, UNIT, None)
    if unit is None:
        return module.weight
    weight: Tensor = module.weight.to(dtype) * unit.to(dtype)[:, None]
    return weight


class FrozenLinear(nn.Linear):
    """A linear layer with a frozen weight in 8 bits, and no adapter."""

    def forward(self, x: Float[Tensor, "... in"]) -> Float[Tensor, "... out"]:
        return base_output(self, x, self.bias)


def freeze_in_8_bits(module: nn.Linear) -> None:
    """Make room for the weight of ``module`` in 8 bits; it has no values yet."""
    device, rows = module.weight.device, len(module.weight)
    values = torch.empty(module.weight.shape, dtype=STORAGE, device=device)
    module.weight = nn.Parameter(values, requires_grad=False)
    unit = torch.empty(rows, dtype=torch.float32, device=device)
    module.register_buffer(UNIT, unit, persistent=False)
    if type(module) is nn.Linear:
        module.__class__ = FrozenLinear


@torch.no_grad()
def stored(model: nn.Module, name: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the parameter ``name`` of ``model`` as it is stored, and the value that it then has.

    ``weight`` is unsharded. The powers of two of its rows are given to its layer.
    """
    layer, _, kind = name.rpartition(".")
    unit = getattr(model.get_submodule(layer), UNIT, None) if kind == "weight" else None
    if unit is None:
        return weight, weight
    values, units = quantized(weight.to(unit.device))
    unit.copy_(units)
    return values, values.float() * units[:, None]
