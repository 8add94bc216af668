"""The norm and modulation of a block on a GPU, with a Triton kernel for the backward pass.

Compiled, PyTorch's reads the gradient and the norm's input twice: for the input's gradient, and for the sums
over tokens. The kernel reads them once, and adds the gradient that the input has as the residual.
Arithmetic is in float32.

Axes: b batch, n tokens, d hidden width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from fluxtrain.model.blocks import EPSILON, modulate

_STEPS = 32
"""Tokens of a program, whose sums it adds up."""
_WARPS = 8


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return (1 + scale) norm(x) + shift, and ``x`` (b n d) for the residual; others are b 1 d."""
    # not in the function: older dynamos fail there at the sizes of several streams, if they are dynamic
    normed = modulate(x.detach(), shift.detach(), scale.detach())
    both: tuple[Tensor, Tensor] = _Modulated.apply(x, shift, scale, normed)
    return both


class _Modulated(torch.autograd.Function):
    """`modulated` of what is ``normed``: its backward pass gets the gradients of both results at once."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shift: Tensor, scale: Tensor, normed: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, scale)
        return normed.view_as(normed), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, scale = ctx.saved_tensors
        has_sums = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        dx, sums = _modulation_backward(*gradients, x, scale, has_sums)
        if not has_sums:
            return dx, None, None, None
        shift, scale = sums.sum(1, keepdim=True).to(scale.dtype).unbind(2)
        return dx, shift, scale, None


@triton_op("fluxtrain::modulation_backward", mutates_args={})
def _modulation_backward(
    dy: Tensor, residual: Tensor, x: Tensor, scale: Tensor, has_sums: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradient of ``x``, and parts of those of shift and scale (b parts 2 d) in float32.

    ``dy`` is that of the modulated norm, ``residual`` that of ``x`` elsewhere.
    """
    b, n, d = x.shape
    dy, residual, x = dense(dy), dense(residual), dense(x)
    scale = scale if scale.stride(2) == 1 else scale.contiguous()
    steps = _STEPS if has_sums else 1
    parts = triton.cdiv(n, steps)
    dx = x.new_empty(b, n, d)
    sums = x.new_empty(b, parts if has_sums else 0, 2, d, dtype=torch.float32)
    launched(_write_modulation)[b, parts](
        *(dy, residual, x, scale, dx, sums, n, dy.stride(1), residual.stride(1), x.stride(1)),
        scale.stride(0),
        EPSILON,
        width=d,
        padded=triton.next_power_of_2(d),
        steps=steps,
        has_sums=has_sums,
        num_warps=_WARPS,
    )
    return dx, sums


def dense(x: Tensor) -> Tensor:
    """Return ``x`` (b n w) with rows that follow each other at one distance."""
    is_dense = x.stride(2) == 1 and x.stride(0) == x.shape[1] * x.stride(1)
    return x if is_dense else x.contiguous()


def launched(kernel: Any) -> Any:
    """Return ``kernel`` as the compiler launches it; Triton's interpreter launches it by itself."""
    return wrap_triton(kernel) if isinstance(kernel, triton.JITFunction) else kernel


@triton.jit  # type: ignore[untyped-decorator]
def _write_modulation(  # type: ignore[no-untyped-def]
    dy,
    residual,
    x,
    scale,
    dx,
    sums,
    n,
    dy_row,
    residual_row,
    x_row,
    scale_row,
    eps,
    width: tl.constexpr,
    padded: tl.constexpr,
    steps: tl.constexpr,
    has_sums: tl.constexpr,
):
    """Write the gradients of ``steps`` tokens of a sample, and the sums of shift's and scale's.

    The compiler passes eps in float64.
    """
    sample, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k = tl.arange(0, padded)
    in_row = k < width
    factor = 1 + tl.load(scale + sample * scale_row + k, mask=in_row, other=0.0).to(tl.float32)
    of_shift, of_scale = tl.zeros((padded,), tl.float32), tl.zeros((padded,), tl.float32)
    for step in range(steps):
        place = part * steps + step
        token = sample * n + place
        ok = k < tl.where(place < n, width, 0)
        value = tl.load(x + token * x_row + k, mask=ok, other=0.0).to(tl.float32)
        value = tl.where(in_row, value - tl.sum(value) / width, 0.0)
        rms = tl.rsqrt(tl.sum(value * value) / width + tl.cast(eps, tl.float32))
        value = value * rms
        g = tl.load(dy + token * dy_row + k, mask=ok, other=0.0).to(tl.float32)
        if has_sums:
            of_shift += g
            of_scale += g * value
        g = g * factor
        g = g - tl.sum(g) / width - value * (tl.sum(g * value) / width)
        own = tl.load(residual + token * residual_row + k, mask=ok, other=0.0).to(tl.float32)
        tl.store(dx + token * width + k, (rms * g + own).to(dx.dtype.element_ty), mask=ok)
    if has_sums:
        to = sums + (sample * tl.num_programs(1) + part) * 2 * width + k
        tl.store(to, of_shift, mask=in_row)
        tl.store(to + width, of_scale, mask=in_row)
