"""The kernels of compiled blocks, counted in the code that torch's compiler generates for the CPU.

A narrow block of two heads is compiled on few tokens: its graph is that of the real one. What is fused for a
GPU may differ.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from fluxtrain.compilation import compile_module
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.model.attention import rotation
from fluxtrain.model.blocks import DoubleStreamBlock, SingleStreamBlock
from fluxtrain.parallelize import DTYPES

_CALL = re.compile(r"^ +(\w+ = )?(cpp_\w+|extern_kernels\.\w+|torch\.ops\.[\w.]+)\(", re.MULTILINE)
_NUM_HEADS, _TOKENS, _BATCH = 2, 16, 2


def compiled_kernels(config: RunConfig) -> dict[str, int]:
    """Return the kernels of forward and backward of a compiled block, by its kind; compiles for a minute."""
    return {"double-stream": _kernels(config, 2), "single-stream": _kernels(config, 1)}


def _kernels(config: RunConfig, num_streams: int) -> int:
    model, dtype = config.model, DTYPES[config.precision.compute]
    hidden = _NUM_HEADS * sum(model.axes_dim)
    kind = DoubleStreamBlock if num_streams == 2 else SingleStreamBlock
    mlp_hidden = int(hidden * model.mlp_ratio)
    block: nn.Module = kind(hidden, _NUM_HEADS, mlp_hidden, model.qk_norm_eps).to(dtype)
    compile_module(block)

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, requires_grad=True)

    streams = [make(_BATCH, _TOKENS, hidden) for _ in range(num_streams)]
    ids = torch.zeros(num_streams * _TOKENS, len(model.axes_dim))
    inputs = *streams, make(_BATCH, hidden), rotation(ids, model.axes_dim, model.theta)

    def pass_both_ways() -> None:
        outputs: Any = block(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])

    _, codes = run_and_get_code(pass_both_ways)
    return sum(len(_CALL.findall(code)) for code in codes)
