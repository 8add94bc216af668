"""What the trainer's own kernels read and write, by Triton's interpreter, which notes each address.

    TRITON_INTERPRET=1 python -m benchmarks.cuda_code.addresses

Prints JSON: bytes of AdamW for each parameter, and of each launch of the blocks' kernels at a small size,
beside those by the formulas that the table uses.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
from benchmarks.cuda_code.own import OWN
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from fluxtrain.contract.run.optim import OptimConfig
from fluxtrain.model import kernels, modulation
from fluxtrain.optim.fused import FusedStep

_BATCH, _TOKENS, _HEADS, _WIDTH = 2, 48, 3, 16
_PARAMETERS = 3 * 16384
_CACHED = ("q_scale", "k_scale", "cos", "sin")
"""Inputs that are small and read by all programs; GELU's has none."""


class Noted:
    """The addresses that kernels read and wrote since the last call of `clear`."""

    def __init__(self) -> None:
        """Have noted nothing."""
        self._places: list[tuple[str, int, np.ndarray[Any, Any]]] = []

    def note(self, way: str, pointers: Any, mask: Any) -> None:
        """Note those of one load or store."""
        size = pointers.get_element_ty().primitive_bitwidth // 8
        self._places.append((way, size, pointers.data[mask.data.astype(bool)].ravel()))

    def clear(self) -> None:
        """Forget all."""
        self._places.clear()

    def total(self, without: list[Tensor]) -> int:
        """Return the bytes, each address once a way, but not of the tensors ``without``."""
        ends = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in without]
        bytes_of_all = 0
        for kind in {(way, size) for way, size, _ in self._places}:
            unique = np.unique(np.concatenate([p for *same, p in self._places if (*same,) == kind]))
            for begin, end in ends:
                unique = unique[(unique < begin) | (unique >= end)]
            bytes_of_all += len(unique) * kind[1]
        return bytes_of_all


def main() -> int:
    """Print the bytes."""
    noted = Noted()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def noting_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        noted.note("read", pointers, mask)
        return load(self, pointers, mask, *rest)

    def noting_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        noted.note("write", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    with (
        mock.patch.object(InterpreterBuilder, "create_masked_load", noting_load),
        mock.patch.object(InterpreterBuilder, "create_masked_store", noting_store),
    ):
        print(json.dumps({"adamw": adamw(noted), "launches": launches(noted)}))
    return 0


def adamw(noted: Noted) -> dict[str, float]:
    """Return the bytes of AdamW's step for each parameter, with the norm's read, by the gradients' type."""
    found = {}
    one = torch.ones(())
    for dtype in (torch.bfloat16, torch.float32):
        gradient = torch.randn(_PARAMETERS).to(dtype)
        states = [torch.randn(_PARAMETERS)], [gradient], *([torch.rand(_PARAMETERS)] for _ in "mv")
        copies = [states[0][0].bfloat16()]
        noted.clear()
        step = FusedStep([1.0], torch.device("cpu"))
        step.take(states, copies, OptimConfig(), 1e-3, one, one, torch.zeros(()))
        moved = noted.total([]) / _PARAMETERS + dtype.itemsize
        found[str(dtype).removeprefix("torch.")] = round(moved, 2)
    return found


def launches(noted: Noted) -> list[tuple[str, int, int]]:
    """Return each launch of both blocks' kernels: name, bytes that were noted, bytes by the formula."""
    found = []

    class Launched:
        def __init__(self, kernel: Any) -> None:
            self._kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*arguments: Any, num_warps: int, **sizes: Any) -> None:
                noted.clear()
                self._kernel[grid](*arguments, **sizes, num_warps=num_warps)
                values = inspect.signature(self._kernel.fn).bind(*arguments, **sizes).arguments
                name = self._kernel.fn.__name__
                names = [each for each in _CACHED if each in values and values.get("heads") != 0]
                total = noted.total([values[each] for each in names])
                found.append((name, total, OWN[name](values)))

            return launch

    width = _HEADS * _WIDTH
    angles = torch.rand(_TOKENS, _WIDTH // 2), torch.rand(_TOKENS, _WIDTH // 2)
    with (
        mock.patch.object(kernels, "launched", Launched),
        mock.patch.object(modulation, "launched", Launched),
    ):
        for kind in (kernels.KernelSingleBlock, kernels.KernelDoubleBlock):
            block = kind(width, _HEADS, 4 * width, 1e-6).bfloat16()
            lengths = [_TOKENS] if kind is kernels.KernelSingleBlock else [_TOKENS // 2] * 2
            streams = [torch.randn(_BATCH, n, width).bfloat16() for n in lengths]
            out = block(*streams, torch.randn(_BATCH, width).bfloat16(), angles)
            outputs = out if isinstance(out, tuple) else (out,)
            torch.autograd.backward(outputs, [torch.randn_like(each) for each in outputs])
    return found


if __name__ == "__main__":
    sys.exit(main())
