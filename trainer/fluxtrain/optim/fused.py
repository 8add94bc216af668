"""AdamW's step of all parameters in one launch on a GPU: clipping, moments, weights, their bfloat16 copies.

It moves 28 bytes a parameter, 30 with a copy, and 2 less with gradients in bfloat16: each value once. Torch's
fused kernel, which stays where there is no Triton, writes gradients back and leaves the copy to another pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fluxtrain.contract.run.optim import OptimConfig

_BLOCK = 1024
_CHUNK = 16 * _BLOCK
"""Values of a program."""
_ALIGNED = 16
"""Bytes, and values: loads of tensors whose addresses and sizes are multiples of it are wide."""


@triton.jit  # type: ignore[untyped-decorator]
def _adamw(  # type: ignore[no-untyped-def]
    table,
    chunks,
    factors,
    numbers,
    base_rate,
    weight_decay,
    beta2,
    gain1,
    gain2,
    eps,
    chunk: tl.constexpr,
    block: tl.constexpr,
    is_narrow: tl.constexpr,
    has_copy: tl.constexpr,
    is_aligned: tl.constexpr,
):
    """Update a chunk of a parameter.

    A row of ``table``: addresses of weight, gradient, both moments, copy; number of values. ``chunks``: the
    parameter and the first value of each program. ``numbers``: divisor of gradients, 1 if the step is left
    out, 1 / the first correction, root of the second. is_aligned: all of a row are multiples of 16, which the
    compiler cannot see in a table; it loads values one by one otherwise.
    """
    parameter = tl.load(chunks + 2 * tl.program_id(0))
    begin = tl.load(chunks + 2 * tl.program_id(0) + 1)
    row = table + 6 * parameter
    weight = tl.load(row).to(tl.pointer_type(tl.float32))
    gradient = tl.load(row + 1).to(tl.pointer_type(tl.bfloat16 if is_narrow else tl.float32))
    average = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    square = tl.load(row + 3).to(tl.pointer_type(tl.float32))
    copy = tl.load(row + 4).to(tl.pointer_type(tl.bfloat16))
    count = tl.load(row + 5)
    begin = tl.multiple_of(begin, 1024)
    if is_aligned:
        weight, gradient = tl.multiple_of(weight, 16), tl.multiple_of(gradient, 16)
        average, square = tl.multiple_of(average, 16), tl.multiple_of(square, 16)
        copy, count = tl.multiple_of(copy, 16), tl.multiple_of(count, 16)
    scale, is_bad = tl.load(numbers), tl.load(numbers + 1)
    rate = base_rate * tl.load(factors + parameter)
    size, root = rate * tl.load(numbers + 2), tl.load(numbers + 3)
    if is_bad == 0:
        for step in range(chunk // block):
            at = begin + step * block + tl.arange(0, block)
            ok = at < count
            g = tl.load(gradient + at, mask=ok, other=0.0).to(tl.float32) / scale
            w = tl.load(weight + at, mask=ok, other=0.0)
            m = tl.load(average + at, mask=ok, other=0.0)
            v = tl.load(square + at, mask=ok, other=0.0)
            m += gain1 * (g - m)
            v = beta2 * v + gain2 * g * g
            w -= rate * weight_decay * w
            w -= size * m / (tl.sqrt(v) / root + eps)
            tl.store(average + at, m, mask=ok)
            tl.store(square + at, v, mask=ok)
            tl.store(weight + at, w, mask=ok)
            if has_copy:
                tl.store(copy + at, w.to(tl.bfloat16), mask=ok)


class FusedStep:
    """The step of parameters with the given learning rate factors, on their device."""

    def __init__(self, factors: Sequence[float], device: torch.device) -> None:
        """Keep ``factors``, of each parameter; the kernel is compiled at the first step."""
        self._factors = torch.tensor(factors, dtype=torch.float32, device=device)
        self._launches: dict[tuple[bool, ...], dict[bool, Tensor]] = {}

    def take(
        self,
        tensors: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]],
        copies: Sequence[Tensor],
        config: OptimConfig,
        rate: float,
        steps_taken: Tensor,
        grad_scale: Tensor,
        found_inf: Tensor,
    ) -> None:
        """Take a step; ``tensors`` are weights, gradients and both moments, ``copies`` in bfloat16 or none.

        Weights and moments are in float32, gradients all in float32 or all in bfloat16; all are contiguous.
        Gradients are divided by ``grad_scale``; nothing changes if ``found_inf`` is not 0.
        """
        weights, gradients, averages, squares = tensors
        columns = weights, gradients, averages, squares, copies or weights
        rows = [
            (*(each.data_ptr() for each in of_one), of_one[0].numel())
            for of_one in zip(*columns, strict=True)
        ]
        device = grad_scale.device
        table = _on(device, rows)  # gradients are new in each step
        first, second = (1 - beta ** steps_taken.double() for beta in (config.beta1, config.beta2))
        numbers = torch.stack([grad_scale, found_inf, 1 / first, second.sqrt()]).float()
        for is_aligned, chunks in self._chunks(rows, device).items():
            _adamw[(len(chunks),)](
                *(table, chunks, self._factors, numbers, rate, config.weight_decay),
                *(config.beta2, 1 - config.beta1, 1 - config.beta2, config.epsilon),
                chunk=_CHUNK,
                block=_BLOCK,
                is_narrow=gradients[0].dtype == torch.bfloat16,
                has_copy=bool(copies),
                is_aligned=is_aligned,
                num_warps=4,
            )

    def _chunks(self, rows: list[tuple[int, ...]], device: torch.device) -> dict[bool, Tensor]:
        """Return (parameter, first value) of each program, of the aligned parameters and of the rest."""
        aligned = tuple(all(number % _ALIGNED == 0 for number in row) for row in rows)
        if aligned not in self._launches:
            chunks = defaultdict[bool, list[tuple[int, int]]](list)
            for index, (kind, row) in enumerate(zip(aligned, rows, strict=True)):
                chunks[kind] += [(index, begin) for begin in range(0, row[-1], _CHUNK)]
            self._launches[aligned] = {kind: _on(device, own) for kind, own in chunks.items()}
        return self._launches[aligned]


def _on(device: torch.device, rows: list[Any]) -> Tensor:
    """Return ``rows`` on ``device``, copied while the host goes on."""
    values = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
    return values.to(device, non_blocking=True)
