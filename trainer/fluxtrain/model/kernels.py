"""Blocks on a GPU with Triton kernels between their matrix products and attention.

The PyTorch blocks are the reference. Compiled, they store what these kernels keep in registers: queries and
keys before and after norm and rotation, in float32 on the way back; parts of a gradient, then all of it; and
they read gradients again for the sums of biases. Here one kernel each way reads the output of a projection
[q | k | v | hidden] and writes what attention reads, or the gradient of the whole output and of the bias.
Arithmetic is in float32. Adapted and frozen layers compute their outputs themselves, without such a bias.

Axes: b batch, n tokens of one stream, s of both, h heads, k head width, w width of a projection.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.library import triton_op
from torch.nn import functional as F  # noqa: N812  (the usual name)

from fluxtrain.model.blocks import (
    DoubleStreamBlock,
    QKNorm,
    Rotation,
    SingleStreamBlock,
    Triple,
    Vec,
    attend,
)
from fluxtrain.model.flux import Flux
from fluxtrain.model.fp8 import Fp8Linear
from fluxtrain.model.modulation import dense, launched, modulated

_TOKENS, _ROWS = 4, 8
"""A program's tile: tokens, and heads or as wide parts of the hidden layer."""
_STEPS = 16
"""Tiles of tokens whose sums a backward program adds up."""
_WIDEST = 128
"""Channels of a row of a tile of GELU's; fewer if the hidden layer is no multiple of it."""


def use_kernels(model: Flux) -> None:
    """Let the blocks of ``model`` compute with kernels; parameters and their names stay."""
    for double_block in model.double_blocks:
        double_block.__class__ = KernelDoubleBlock
    for single_block in model.single_blocks:
        single_block.__class__ = KernelSingleBlock


class KernelSingleBlock(SingleStreamBlock):
    """A single-stream block whose heads and GELU are one operation."""

    def forward(self, x: Tensor, vec: Vec, positions: Rotation) -> Tensor:
        ((shift, scale, gate),) = self.modulation(vec)
        normed, x = modulated(x, shift, scale)
        projected, *asked = _output(self.linear1, normed)
        q, k, v, hidden = _SingleHeads.apply(
            *(projected, *asked, *positions, *_scales(self.norm), _eps(self.norm), self.num_heads)
        )
        concatenated = torch.cat((attend(q, k, v), hidden), dim=-1)
        return _gated(x, gate, self.linear2, concatenated)


class KernelDoubleBlock(DoubleStreamBlock):
    """A double-stream block whose streams are joined by the operation that rotates them."""

    def forward(
        self, img: Tensor, txt: Tensor, vec: Vec, positions: Rotation
    ) -> tuple[Tensor, Tensor]:
        (img_shift, img_scale, img_gate), img_mlp_mod = self.img_mod(vec)
        (txt_shift, txt_scale, txt_gate), txt_mlp_mod = self.txt_mod(vec)
        of_img, of_txt, length = self.img_attn, self.txt_attn, txt.shape[1]

        normed_txt, txt = modulated(txt, txt_shift, txt_scale)
        normed_img, img = modulated(img, img_shift, img_scale)
        txt_qkv, *of_txt_qkv = _output(of_txt.qkv, normed_txt)
        img_qkv, *of_img_qkv = _output(of_img.qkv, normed_img)
        scales = *_scales(of_txt.norm), *_scales(of_img.norm)
        numbers = _eps(of_img.norm), of_img.num_heads
        q, k, v = _JointHeads.apply(
            *(txt_qkv, img_qkv, *of_txt_qkv, *of_img_qkv, *scales, *positions, *numbers)
        )
        attended = attend(q, k, v)

        img = _gated(img, img_gate, of_img.proj, attended[:, length:])
        txt = _gated(txt, txt_gate, of_txt.proj, attended[:, :length])
        return _add_mlp(img, self.img_mlp, img_mlp_mod), _add_mlp(txt, self.txt_mlp, txt_mlp_mod)


def _add_mlp(x: Tensor, layers: nn.Sequential, mod: Triple) -> Tensor:
    shift, scale, gate = mod
    normed, x = modulated(x, shift, scale)
    hidden, bias, told = _output(layers[0], normed)
    activated = _gelu(hidden) if bias is None else _Gelu.apply(hidden, bias, told)
    return _gated(x, gate, layers[2], activated)


def _gated(x: Tensor, gate: Tensor, layer: nn.Module, inputs: Tensor) -> Tensor:
    """Return ``x`` + ``gate`` times the output of ``layer``."""
    y, bias, told = _output(layer, inputs)
    if bias is None:
        return torch.addcmul(x, gate, y)
    summed: Tensor = _Gated.apply(x, gate, y, bias, told)
    return summed


def _output(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the output of ``layer``, and its bias if what follows must make the bias's gradient.

    And the zero of a layer in fp8 with one scale a tensor: its gradient is the largest value of the output's.
    """
    if isinstance(layer, Fp8Linear):
        is_told = layer.recipe == "tensorwise"
        y, told = layer.output(x, layer.bias.detach(), is_told)
        return y, layer.bias, told if is_told else None
    if type(layer) is nn.Linear and layer.bias.requires_grad:
        return F.linear(x, layer.weight, layer.bias.detach()), layer.bias, None
    return layer(x), None, None


def _scales(norm: QKNorm) -> tuple[Tensor, Tensor]:
    return norm.query_norm.scale, norm.key_norm.scale


def _eps(norm: QKNorm) -> float:
    return norm.query_norm.eps


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


# Operations of autograd. An operation of torch.library cannot own the gradient of a bias, and returns q and k
# as one tensor, whose gradients would be concatenated.


class _SingleHeads(torch.autograd.Function):
    """q, k and v (b h s k), v a view, and GELU's output, of a single block's projection (b s w).

    Makes the gradients of all of the projection, of its ``bias`` and of ``told``, unless these are None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        told: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        q_scale: Tensor,
        k_scale: Tensor,
        eps: float,
        heads: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.save_for_backward(x, q_scale, k_scale, cos, sin)
        ctx.eps, ctx.heads, ctx.dtype = eps, heads, None if bias is None else bias.dtype
        ctx.is_told = told is not None
        width = 3 * heads * q_scale.shape[0]
        v = x[..., :width].view(*x.shape[:2], 3, heads, -1)[:, :, 2].transpose(1, 2)
        q, k = _parts(_single_heads(x, q_scale, k_scale, cos, sin, eps, heads))
        return q, k, v, _gelu(x[..., width:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, q_scale, k_scale, cos, sin = ctx.saved_tensors
        dx, sums, scales, largest = _heads_backward(
            *(*gradients, x, q_scale, k_scale, cos, sin, ctx.eps, ctx.heads, 0),
            *(ctx.dtype is not None, ctx.is_told),
        )
        bias = None if ctx.dtype is None else sums.to(ctx.dtype)
        told = largest.amax() if ctx.is_told else None
        of_scales = [each.to(q_scale.dtype) for each in scales]
        return dx, bias, told, None, None, *of_scales, None, None


class _JointHeads(torch.autograd.Function):
    """q, k and v (b h s k) of text, then image, from both streams' projections (b n w).

    Makes the gradients of both, and those of their biases and of what is told, unless they are None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        txt: Tensor,
        img: Tensor,
        txt_bias: Tensor | None,
        txt_told: Tensor | None,
        img_bias: Tensor | None,
        img_told: Tensor | None,
        txt_q_scale: Tensor,
        txt_k_scale: Tensor,
        img_q_scale: Tensor,
        img_k_scale: Tensor,
        cos: Tensor,
        sin: Tensor,
        eps: float,
        heads: int,
    ) -> tuple[Tensor, ...]:
        scales = [txt_q_scale, txt_k_scale, img_q_scale, img_k_scale]
        ctx.save_for_backward(txt, img, *scales, cos, sin)
        ctx.eps, ctx.heads = eps, heads
        ctx.dtypes = [None if each is None else each.dtype for each in (txt_bias, img_bias)]
        ctx.are_told = txt_told is not None, img_told is not None
        return _parts(_joint_heads(txt, img, scales, cos, sin, eps, heads))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        txt, img, *scales, cos, sin = ctx.saved_tensors
        streams = (txt, *scales[:2], 0), (img, *scales[2:], txt.shape[1])
        dx, of_scales, asked = [], [], []
        for i, (x, q_scale, k_scale, first) in enumerate(streams):
            dtype, is_told = ctx.dtypes[i], ctx.are_told[i]
            numbers = ctx.eps, ctx.heads, first, dtype is not None, is_told
            inputs = *gradients, None, x, q_scale, k_scale, cos, sin, *numbers
            d, sums, of_both, largest = _heads_backward(*inputs)
            dx.append(d)
            of_scales += [each.to(q_scale.dtype) for each in of_both]
            asked += [None if dtype is None else sums.to(dtype)]
            asked += [largest.amax() if is_told else None]
        return *dx, *asked, *of_scales, None, None, None, None


class _Gelu(torch.autograd.Function):
    """GELU (tanh) of a layer's output ``x`` (b n w); makes the gradients of its ``bias`` and ``told`` too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, told: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.dtype, ctx.is_told = bias.dtype, told is not None
        return _gelu(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        (x,) = ctx.saved_tensors
        dx, sums, largest = _gelu_backward(gradients[0], x, ctx.is_told)
        return dx, sums.to(ctx.dtype), largest.amax() if ctx.is_told else None


class _Gated(torch.autograd.Function):
    """``x`` + ``gate`` times a layer's output ``y`` (b n d); makes the gradient of the layer's ``bias`` too.

    That is a product of sums over tokens, which the compiler fuses with those of the gate.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor, y: Tensor, bias: Tensor, told: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(gate, y)
        ctx.dtype, ctx.is_told = bias.dtype, told is not None
        return torch.addcmul(x, gate, y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (gate, y) = gradients, ctx.saved_tensors
        dy = g * gate
        of_gate = (g.float() * y.float()).sum(1, keepdim=True).to(gate.dtype)
        of_bias = (g.float().sum(1, keepdim=True) * gate.float()).sum((0, 1)).to(ctx.dtype)
        largest = dy.float().abs().amax(1).amax() if ctx.is_told else None
        return g, of_gate, dy, of_bias, largest


def _parts(joined: Tensor) -> tuple[Tensor, ...]:
    """Return the parts, each b h s k, of ``joined`` (b s parts h k)."""
    return joined.permute(2, 0, 3, 1, 4).unbind()


# Operations that the compiler calls.


@triton_op("fluxtrain::single_heads", mutates_args={})
def _single_heads(
    x: Tensor, q_scale: Tensor, k_scale: Tensor, cos: Tensor, sin: Tensor, eps: float, heads: int
) -> Tensor:
    """Return q and k (b s 2 h k) of the projection ``x`` (b s w)."""
    y = x.new_empty(*x.shape[:2], 2, heads, q_scale.shape[0])
    _launch_forward(x, y, (q_scale, k_scale), (cos, sin), eps, 0)
    return y


@triton_op("fluxtrain::joint_heads", mutates_args={})
def _joint_heads(
    txt: Tensor, img: Tensor, scales: list[Tensor], cos: Tensor, sin: Tensor, eps: float, heads: int
) -> Tensor:
    """Return q, k and v (b s 3 h k) of text, then image; ``scales`` are text's of q and k, and image's."""
    b, length, _ = txt.shape
    y = txt.new_empty(b, length + img.shape[1], 3, heads, scales[0].shape[0])
    _launch_forward(txt, y, (scales[0], scales[1]), (cos, sin), eps, 0)
    _launch_forward(img, y, (scales[2], scales[3]), (cos, sin), eps, length)
    return y


def _launch_forward(
    x: Tensor,
    y: Tensor,
    scales: tuple[Tensor, Tensor],
    rotation: Rotation,
    eps: float,
    first: int,
) -> None:
    """Write the heads of ``x`` (b n w) to those of ``y`` (b s parts h k), from token ``first`` on."""
    x = dense(x)
    (b, n, _), (total, parts, heads, k) = x.shape, y.shape[1:]
    launched(_write_heads)[(triton.cdiv(b * n, _TOKENS), parts, triton.cdiv(heads, _ROWS))](
        *(x, y, *scales, *rotation, eps, b * n, n, total, first, x.stride(1), y.stride(1)),
        heads=heads,
        width=k,
        tokens=_TOKENS,
        rows=_ROWS,
        num_warps=4,
    )


@triton_op("fluxtrain::heads_backward", mutates_args={})
def _heads_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    da: Tensor | None,
    x: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    heads: int,
    first: int,
    has_bias: bool,
    has_largest: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the projection ``x`` (b n w), of its bias (w), and of both scales (2 k).

    dq, dk and dv are b h s k, those of ``x`` from token ``first`` on; da is GELU's, if there is one. Sums are
    in float32, as the largest absolute values of the first gradient's tiles, the last that is returned.
    Without ``has_bias`` and ``has_largest`` the bias's gradient and these are empty.
    """
    scales, rotation, k = (q_scale, k_scale), (cos, sin), q_scale.shape[0]
    of_heads = tuple(each if each.stride(3) == 1 else each.contiguous() for each in (dq, dk, dv))
    da = None if da is None else dense(da)
    return _launch_backward(
        *(of_heads, da, dense(x), scales, rotation, eps, heads, k, first, has_bias, has_largest)
    )


@triton_op("fluxtrain::gelu_backward", mutates_args={})
def _gelu_backward(da: Tensor, x: Tensor, has_largest: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of GELU's input ``x`` (b n w), its sum over tokens, its tiles' largest values.

    These are as in `_heads_backward`.
    """
    x, da, k = dense(x), dense(da), math.gcd(x.shape[2], _WIDEST)
    unread = da[:, None]  # there are no heads
    dx, sums, _, largest = _launch_backward(
        *((unread,) * 3, da, x, (x, x), (x, x), 0.0, 0, k, 0, True, has_largest)
    )
    return dx, sums, largest


def _launch_backward(
    of_heads: tuple[Tensor, ...],
    da: Tensor | None,
    x: Tensor,
    scales: tuple[Tensor, Tensor],
    rotation: Rotation,
    eps: float,
    heads: int,
    k: int,
    first: int,
    has_bias: bool,
    has_largest: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden = 0 if da is None else da.shape[2] // k
    b, n, width = *x.shape[:2], (3 * heads + hidden) * k
    blocks, groups = triton.cdiv(b * n, _TOKENS * _STEPS), triton.cdiv(heads, _ROWS)
    grid = blocks, 3 * groups + triton.cdiv(hidden, _ROWS)
    of_hidden = x if da is None else da
    dx = x.new_empty(b, n, width)
    sums = x.new_empty(blocks, width if has_bias else 0, dtype=torch.float32)
    of_scales = x.new_empty(blocks, 2, groups, k, dtype=torch.float32)
    largest = x.new_empty(*grid if has_largest else (0,), dtype=torch.float32)
    strides = [each.stride(axis) for each in of_heads for axis in range(3)]
    launched(_write_gradients)[grid](
        *(*of_heads, of_hidden, x, dx, *scales, *rotation, of_scales, sums, largest),
        *(eps, b * n, n, first, *strides, of_hidden.stride(1), x.stride(1), width),
        heads=heads,
        hidden=hidden,
        width=k,
        has_bias=has_bias,
        has_largest=has_largest,
        tokens=_TOKENS,
        rows=_ROWS,
        steps=_STEPS,
        num_warps=4,
    )
    return dx, sums.sum(0), of_scales.sum((0, 2)), largest


# The kernels.


@triton.jit  # type: ignore[untyped-decorator]
def _turned(even, odd, cos, sin, count: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return rows whose channels (2j, 2j+1) are rotated together."""
    turned = tl.join(cos * even - sin * odd, sin * even + cos * odd)
    return tl.reshape(turned, (count, width))


@triton.jit  # type: ignore[untyped-decorator]
def _write_heads(  # type: ignore[no-untyped-def]
    x,
    y,
    q_scale,
    k_scale,
    cos,
    sin,
    eps,
    count,
    n,
    total,
    first,
    x_row,
    y_row,
    heads: tl.constexpr,
    width: tl.constexpr,
    tokens: tl.constexpr,
    rows: tl.constexpr,
):
    """Write a tile of q, k (normalised and rotated) or v: part 0, 1, 2 of a row of ``x`` and of ``y``.

    ``count`` tokens of samples of ``n``, which are ``total`` in ``y``. The compiler passes eps in float64.
    """
    part, group = tl.program_id(1), tl.program_id(2)
    r, k = tl.arange(0, tokens * rows), tl.arange(0, width)
    token = tl.program_id(0).to(tl.int64) * tokens + r // rows
    head = group * rows + r % rows
    ok = ((token < count) & (head < heads))[:, None]
    place = first + token % n
    column = (part * heads + head) * width
    value = tl.load(x + (token * x_row + column)[:, None] + k[None, :], mask=ok, other=0.0)
    value = value.to(tl.float32)
    if part < 2:
        scale = tl.load((q_scale if part == 0 else k_scale) + k).to(tl.float32)
        rms = tl.rsqrt(tl.sum(value * value, 1) / width + tl.cast(eps, tl.float32))
        value = value * rms[:, None] * scale[None, :]
        even, odd = tl.split(tl.reshape(value, (tokens * rows, width // 2, 2)))
        angle = place[:, None] * (width // 2) + tl.arange(0, width // 2)[None, :]
        c = tl.load(cos + angle, mask=ok, other=0.0)
        s = tl.load(sin + angle, mask=ok, other=0.0)
        value = _turned(even, odd, c, s, tokens * rows, width)
    target = (token // n * total + place) * y_row + column
    tl.store(y + target[:, None] + k[None, :], value.to(y.dtype.element_ty), mask=ok)


@triton.jit  # type: ignore[untyped-decorator]
def _larger(  # type: ignore[no-untyped-def]
    most,
    values,
    tokens: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
    is_used: tl.constexpr,
):
    """Return ``most`` or the absolute ``values``: the larger float32 by its bits, NaN above all."""
    if is_used:
        bits = values.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        most = tl.maximum(most, tl.max(tl.reshape(bits, (tokens, rows, width)), 0))
    return most


@triton.jit  # type: ignore[untyped-decorator]
def _write_gradients(  # type: ignore[no-untyped-def]
    dq,
    dk,
    dv,
    da,
    x,
    dx,
    q_scale,
    k_scale,
    cos,
    sin,
    scale_sums,
    bias_sums,
    largest,
    eps,
    count,
    n,
    first,
    q_b,
    q_h,
    q_s,
    k_b,
    k_h,
    k_s,
    v_b,
    v_h,
    v_s,
    a_row,
    x_row,
    dx_row,
    heads: tl.constexpr,
    hidden: tl.constexpr,
    width: tl.constexpr,
    has_bias: tl.constexpr,
    has_largest: tl.constexpr,
    tokens: tl.constexpr,
    rows: tl.constexpr,
    steps: tl.constexpr,
):
    """Write the gradient of a group of columns of q, k, v or GELU's input, and their sums over tokens.

    A program has ``steps`` tiles of ``tokens``. GELU's columns are ``hidden`` times ``width``; there are no
    others without ``heads``.
    """
    groups: tl.constexpr = (heads + rows - 1) // rows
    size: tl.constexpr = tokens * rows
    part = 3 if heads == 0 else tl.minimum(tl.program_id(1) // groups, 3)
    group = tl.program_id(1) - part * groups
    r, k = tl.arange(0, size), tl.arange(0, width)
    head = group * rows + r % rows
    limit = heads if part < 3 else hidden
    column = (part * heads + head) * width
    scale = tl.load((q_scale if part == 0 else k_scale) + k).to(tl.float32)
    bias, scales = tl.zeros((rows, width), tl.float32), tl.zeros((width,), tl.float32)
    most = tl.zeros((rows, width), tl.int32)
    for step in range(steps):
        token = (tl.program_id(0).to(tl.int64) * steps + step) * tokens + r // rows
        ok = ((token < count) & (head < limit))[:, None]
        place, batch = first + token % n, token // n
        if part == 0:
            row = dq + (batch * q_b + head * q_h + place * q_s)[:, None]
            g = tl.load(row + k[None, :], mask=ok, other=0.0)
        elif part == 1:
            row = dk + (batch * k_b + head * k_h + place * k_s)[:, None]
            g = tl.load(row + k[None, :], mask=ok, other=0.0)
        elif part == 2:
            row = dv + (batch * v_b + head * v_h + place * v_s)[:, None]
            g = tl.load(row + k[None, :], mask=ok, other=0.0)
        else:
            row = da + (token * a_row + head * width)[:, None]
            g = tl.load(row + k[None, :], mask=ok, other=0.0)
        g = g.to(tl.float32)
        at = (token * x_row + column)[:, None] + k[None, :]
        if part < 2:
            value = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
            angle = place[:, None] * (width // 2) + tl.arange(0, width // 2)[None, :]
            c = tl.load(cos + angle, mask=ok, other=0.0)
            s = tl.load(sin + angle, mask=ok, other=0.0)
            even, odd = tl.split(tl.reshape(g, (size, width // 2, 2)))
            g = _turned(even, odd, c, -s, size, width)
            rms = tl.rsqrt(tl.sum(value * value, 1) / width + tl.cast(eps, tl.float32))
            value = value * rms[:, None]
            scales += tl.sum(g * value, 0)
            g = g * scale[None, :]
            g = rms[:, None] * (g - value * (tl.sum(g * value, 1) / width)[:, None])
        if part == 3:
            value = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
            inner = 0.7978845608028654 * (value + 0.044715 * value * value * value)
            tanh = 2 * tl.sigmoid(2 * inner) - 1
            slope = 0.7978845608028654 * (1 + 0.134145 * value * value)
            g = g * 0.5 * (1 + tanh + value * (1 - tanh * tanh) * slope)
        to = (token * dx_row + column)[:, None] + k[None, :]
        result = g.to(dx.dtype.element_ty)
        tl.store(dx + to, result, mask=ok)
        most = _larger(most, result, tokens, rows, width, has_largest)
        if has_bias:
            bias += tl.sum(tl.reshape(g, (tokens, rows, width)), 0)
    if has_bias:
        own = group * rows + tl.arange(0, rows)
        sums = bias_sums + tl.program_id(0) * dx_row + (part * heads + own)[:, None] * width
        tl.store(sums + k[None, :], bias, mask=(own < limit)[:, None])
    own_largest = largest + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(own_largest, tl.max(most).to(tl.float32, bitcast=True), mask=has_largest)
    if part < 2:
        of_scale = scale_sums + ((tl.program_id(0) * 2 + part) * groups + group) * width
        tl.store(of_scale + k, scales)
