"""The code that inductor writes for a block of FLUX.1, forward and backward; nothing is compiled or run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from benchmarks.cuda_code.traffic import Kernel, kernels_of
from torch import Tensor, nn
from torch._inductor.graph import GraphLowering
from torch._subclasses import FakeTensorMode

from fluxtrain.contract.run.adapter import AdapterConfig
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.model.flux import Flux
from fluxtrain.model.fp8 import Fp8Linear, use_fp8
from fluxtrain.model.kernels import use_kernels
from fluxtrain.model.layers import adapted_layers
from fluxtrain.model.lora import add_adapters
from fluxtrain.parallel.compile import compile_module
from fluxtrain.parallel.parallelize import WeightScaling

BATCH, IMAGE, TEXT = 32, 256, 256
MODEL = ModelConfig(depth=1, depth_single_blocks=1)
UNIT = BATCH * (IMAGE + TEXT) * MODEL.hidden_size * 2
"""Bytes of one activation in bfloat16: u."""
GPU = torch.device("cuda", 0)


@dataclass
class Code:
    """What inductor generated for one block."""

    kernels: list[Kernel]
    saved: int
    """Bytes of activations that the forward pass keeps."""

    @property
    def by_inductor(self) -> int:
        """Return the bytes that inductor counts."""
        return sum(kernel.by_inductor for kernel in self.kernels)

    @property
    def exact(self) -> int:
        """Return the bytes that are read and written."""
        return sum(kernel.exact for kernel in self.kernels)


class _GeneratedError(Exception):
    """The code is there, and its forward pass would run."""


def generate(kind: str, precision: str, *, own: bool) -> Code:
    """Return the code of a block, ``kind`` double or single, with the trainer's ``own`` kernels or not.

    ``precision`` is bfloat16, a recipe of fp8, or lora: frozen weights in bfloat16 with the default adapters.
    """
    model = _model(precision)
    if own:
        use_kernels(model)
    block = (model.double_blocks if kind == "double" else model.single_blocks)[0]
    code = Code([], 0)

    def keep(graph: GraphLowering) -> Any:
        graph.codegen()
        code.kernels += kernels_of(graph)
        if not graph.is_backward:
            code.saved = _saved(graph, 2 if kind == "double" else 1, block)
        return SimpleNamespace(call=_stop, __file__="")

    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        mock.patch.object(GraphLowering, "compile_to_module", keep),
        torch._inductor.config.patch(fx_graph_cache=False, joint_graph_constant_folding=False),
        torch._functorch.config.patch(
            enable_autograd_cache=False, force_non_lazy_backward_lowering=True
        ),
        _no_warnings(),
    ):
        for module in block.modules():
            for name, parameter in module._parameters.items():
                new = nn.Parameter(_new(*parameter.shape), requires_grad=parameter.requires_grad)
                module._parameters[name] = new
        WeightScaling(block, torch.bfloat16)
        for module in block.modules():
            if isinstance(module, Fp8Linear) and module.recipe == "tensorwise":
                module.values = torch.empty_like(module.weight, dtype=module.dialect.forward)
        width = MODEL.hidden_size
        lengths = [IMAGE, TEXT] if kind == "double" else [IMAGE + TEXT]
        streams = [_new(BATCH, n, width).requires_grad_() for n in lengths]
        angles = [_new(IMAGE + TEXT, sum(MODEL.axes_dim) // 2, dtype=torch.float32) for _ in "cs"]
        torch.compiler.reset()
        compile_module(block)
        try:
            block(*streams, _new(BATCH, width).requires_grad_(), tuple(angles))
        except _GeneratedError:
            return code
    raise RuntimeError("the block ran without generated code")


def _model(precision: str) -> Flux:
    """Return the model of one block of each kind, on the meta device."""
    with torch.device("meta"):
        model = Flux(MODEL)
        if precision == "lora":
            add_adapters(model, adapted_layers(MODEL, AdapterConfig()), torch.bfloat16)
    if precision in ("tensorwise", "rowwise"):
        use_fp8(model, precision, GPU)
    return model


def _new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=GPU)


def _stop(*_: object) -> None:
    raise _GeneratedError


def _saved(graph: GraphLowering, outputs: int, block: nn.Module) -> int:
    """Return the bytes that the forward ``graph`` returns beside its ``outputs``, without parameters."""
    parameters = {parameter.shape for parameter in block.parameters()}
    (output,) = graph.module.graph.find_nodes(op="output")
    total = 0
    for node in output.args[0][outputs:]:
        value = node.meta.get("val")
        is_parameter = node.op == "placeholder" and value.shape in parameters
        if isinstance(value, Tensor) and not is_parameter:
            total += value.numel() * value.element_size()
    return total


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Raise what torch only warns of: a kernel that it cannot read, of which every input is mutated then."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = _raise  # type: ignore[method-assign]
    logger = logging.getLogger("torch._higher_order_ops.triton_kernel_wrap")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _raise(record: logging.LogRecord) -> None:
    raise RuntimeError(record.getMessage())
