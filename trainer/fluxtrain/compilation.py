"""Compilation of the blocks with torch.compile: whether this machine can, and how."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

import torch
from torch import nn

from fluxtrain.contract.run.config import ParallelConfig
from fluxtrain.errors import ConfigError
from fluxtrain.model.flux import Flux

BACKEND = "inductor"
"""Torch's compiler of graphs."""


def blocks(model: Flux) -> list[nn.Module]:
    """Return the double-stream, then the single-stream blocks."""
    return [*model.double_blocks, *model.single_blocks]


def compile_blocks(model: Flux) -> None:
    """Compile each block separately, for each shape: equal blocks share one compiled graph."""
    for block in blocks(model):
        compile_module(block)


def compile_module(module: nn.Module) -> None:
    """Compile ``module`` when it is called, whole and for each shape."""
    module.compile(fullgraph=True, dynamic=False, backend=BACKEND)


def compiles(parallel: ParallelConfig, device: torch.device) -> bool:
    """Return whether the blocks are compiled on ``device``.

    Raises ConfigError if ``parallel.compile`` is true, and this machine lacks a compiler.
    """
    missing = missing_compiler(device)
    if parallel.compile and missing is not None:
        reason = f"{missing} on this machine; install it, or set this to false"
        raise ConfigError("spec.run.parallel.compile", True, reason)
    return parallel.compiles(has_gpu=device.type == "cuda") and missing is None


def missing_compiler(device: torch.device) -> str | None:
    """Return what torch.compile needs for ``device`` and this machine lacks, None if it lacks nothing."""
    if device.type == "cuda":
        if find_spec("triton") is None:
            return "Triton is missing"
        names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]  # as Triton does
        text = f"a C compiler ({' or '.join(names)}) is missing"
        return None if any(map(shutil.which, names)) else text
    name = os.environ.get("CXX", "g++")  # as torch does
    return None if shutil.which(name) else f"the C++ compiler {name} is missing"
