"""Frozen weights in 8 bits: a value in fp8 (e4m3) and, for each row, a power of two that multiplies it.

A product with them needs no fp8 hardware: values become the compute dtype, in which they are exact, and so
are the powers of two. Nothing of the compute dtype is kept for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the usual name)

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


class _Product(torch.autograd.Function):
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
    y: Tensor = _Product.apply(x, module.weight, unit, bias)
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
        """Return x W^T + bias."""
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
