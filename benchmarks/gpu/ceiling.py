"""The lower bound of a step: the model's own matrix products, attention and copies, one by one.

A product runs as often as the model has the layer: forward (rows x in, in x out), the gradient of its input
and the gradient of its weight. The bound is the sum of all products, of attention by the fastest backend, and
of the bytes that AdamW moves; element-wise work, which can be fused into these, is not in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from benchmarks.gpu.setting import Setting, bf16_peak, device, machine
from benchmarks.gpu.timing import seconds_of
from benchmarks.table import print_table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fluxtrain.model.cost import linears
from fluxtrain.model.fp8 import Rounded, dialect_of, product
from fluxtrain.model.parameters import count_parameters
from fluxtrain.parallel.compile import BACKENDS, attention_backend

ADAMW_BYTES = 6 * 4 + 2 * 2
"""Bytes that one AdamW step moves per parameter: reads and writes weight and both moments in float32, reads
the gradient of one micro batch and writes the rounded weight in bfloat16."""
_COPY_BYTES = 1 << 30


@dataclass(frozen=True)
class Product:
    """One matrix product: (m x k) by (k x n); ``gradient`` if a factor is a gradient (e5m2 in fp8)."""

    m: int
    k: int
    n: int
    gradient: bool

    @property
    def flops(self) -> int:
        """Return its FLOPs."""
        return 2 * self.m * self.k * self.n


def products(setting: Setting) -> Counter[Product]:
    """Return the products of a step, with the number of layers that have each."""
    counts: Counter[Product] = Counter()
    for layer in linears(setting.model, setting.image_tokens, setting.text):
        rows = layer.rows * setting.batch
        counts[Product(rows, layer.inputs, layer.outputs, gradient=False)] += 1
        counts[Product(layer.outputs, rows, layer.inputs, gradient=True)] += 1
        if not layer.is_first:
            counts[Product(rows, layer.outputs, layer.inputs, gradient=True)] += 1
    return counts


def measure(setting: Setting, toy: bool) -> dict[str, Any]:
    """Return the seconds of each part, and the bound."""
    counts = products(setting)
    rows = [
        {
            "m": shape.m,
            "k": shape.k,
            "n": shape.n,
            "gradient": shape.gradient,
            "count": count,
            "flops": shape.flops,
            "bf16_seconds": seconds_of(_bf16(shape)),
            "fp8_seconds": _fp8_seconds(shape),
        }
        for shape, count in counts.items()
    ]
    attention = {name: seconds for name, seconds in attention_seconds(setting)}
    copy_bytes = _COPY_BYTES if not toy else 1 << 20
    bandwidth = 2 * copy_bytes / seconds_of(copy(copy_bytes))
    return {
        "machine": machine(),
        "setting": {"batch": setting.batch, "latent": setting.latent, "text": setting.text},
        "depth": setting.depth,
        "products": rows,
        "attention_seconds": attention,
        "copy_bytes_per_second": bandwidth,
        **_bounds(setting, rows, attention, bandwidth),
    }


def _bounds(
    setting: Setting, rows: list[dict[str, Any]], attention: dict[str, float], bandwidth: float
) -> dict[str, Any]:
    blocks = sum(setting.depth)
    attend = blocks * min(attention.values())
    update = count_parameters(setting.model).total * ADAMW_BYTES / bandwidth
    bf16 = sum(row["count"] * row["bf16_seconds"] for row in rows)
    bounds = {"bf16": bf16 + attend + update}
    if all(row["fp8_seconds"] is not None for row in rows):
        fp8 = sum(row["count"] * min(row["fp8_seconds"], row["bf16_seconds"]) for row in rows)
        bounds["fp8"] = fp8 + attend + update
    return {
        "gemm_seconds": bf16,
        "attention_seconds_of_step": attend,
        "optimizer_seconds": update,
        "step_seconds": bounds,
    }


def _bf16(shape: Product) -> Any:
    a = torch.randn(shape.m, shape.k, device=device(), dtype=torch.bfloat16)
    b = torch.randn(shape.k, shape.n, device=device(), dtype=torch.bfloat16)
    return lambda: a @ b


def _fp8_seconds(shape: Product) -> float | None:
    """Return the seconds in fp8 with one scale per tensor; None if this device or shape has no kernel."""
    with suppress(RuntimeError, NotImplementedError, AttributeError, ValueError):
        return seconds_of(_fp8(shape))
    return None


def _fp8(shape: Product) -> Any:
    """Return the product as the trainer computes it: only a forward pass adds with less precision."""
    forward, backward = dialect_of(device())
    first = backward if shape.gradient else forward
    one = torch.ones((), device=device())
    a = Rounded(torch.randn(shape.m, shape.k, device=device()).to(first), one)
    # column-major, as the kernel takes it
    b = Rounded(torch.randn(shape.n, shape.k, device=device()).to(forward).t(), one)
    return lambda: product(a, b, torch.bfloat16, fast=not shape.gradient)


def attention_seconds(setting: Setting) -> Iterator[tuple[str, float]]:
    """Yield the seconds of one block's attention, forward and backward, for each backend that works."""
    heads, tokens = setting.model.num_heads, setting.image_tokens + setting.text
    shape = (setting.batch, heads, tokens, setting.model.hidden_size // heads)
    q, k, v, gradient = (
        torch.randn(shape, device=device(), dtype=torch.bfloat16) for _ in range(4)
    )
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]

    def attend() -> tuple[Tensor, ...]:
        return torch.autograd.grad(scaled_dot_product_attention(*inputs), inputs, gradient)

    for name in BACKENDS:
        with suppress(RuntimeError), attention_backend(name):
            yield name, seconds_of(attend)


def copy(size: int) -> Any:
    """Return a copy of ``size`` bytes on the device."""
    source = torch.randn(size // 4, device=device())
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def report(result: dict[str, Any], setting: Setting) -> None:
    """Print the table."""
    peak = bf16_peak()
    rows = []
    for row in sorted(result["products"], key=lambda row: -row["count"] * row["bf16_seconds"])[:16]:
        rate = row["flops"] / row["bf16_seconds"]
        fp8 = row["fp8_seconds"]
        rows.append(
            [
                f"{row['m']} x {row['k']} x {row['n']}{' gradient' if row['gradient'] else ''}",
                str(row["count"]),
                f"{row['bf16_seconds'] * 1e3:.3f}",
                f"{rate / 1e12:.0f}",
                f"{rate / peak:.0%}" if peak else "-",
                f"{fp8 * 1e3:.3f}" if fp8 else "-",
                f"{row['flops'] / fp8 / 1e12:.0f}" if fp8 else "-",
            ]
        )
    head = ["product", "layers", "bf16 ms", "TFLOP/s", "of peak", "fp8 ms", "TFLOP/s"]
    print_table("matrix products, those that take longest first", head, rows)
    attention = [
        [name, f"{1e3 * seconds:.3f}"] for name, seconds in result["attention_seconds"].items()
    ]
    print_table("attention of one block, forward and backward", ["backend", "ms"], attention)
    rate = result["copy_bytes_per_second"] / 1e12
    print(f"copy: {rate:.2f} TB/s, read and written")
    bounds = []
    for name, seconds in result["step_seconds"].items():
        achieved = setting.batch * setting.flops / seconds
        bounds.append(
            [
                name,
                f"{1e3 * seconds:.0f}",
                f"{setting.batch / seconds:.1f}",
                f"{achieved / peak:.0%}" if peak else "-",
            ]
        )
    double, single = setting.depth
    title = f"lower bound of a step, {double}+{single} blocks, batch {setting.batch}"
    print_table(title, ["", "ms", "samples/s", "MFU (bf16 peak)"], bounds)
