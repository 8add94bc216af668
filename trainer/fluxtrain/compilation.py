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
_MOST_GRAPHS = 64
"""Graphs of a kind of block, of which torch allows 8: more end the run."""


def blocks(model: Flux) -> list[nn.Module]:
    """Return the double-stream, then the single-stream blocks."""
    return [*model.double_blocks, *model.single_blocks]


def compile_blocks(model: Flux, has_sizes: bool = False) -> None:
    """Compile each block separately: equal blocks share one compiled graph.

    It is of one shape; if batches have several sizes, of all: each would take a minute otherwise. Then there
    may be a few more, as for a single sample, or as many image tokens as text tokens.
    """
    if has_sizes:
        torch._dynamo.config.recompile_limit = _MOST_GRAPHS
    for block in blocks(model):
        compile_module(block, has_sizes)


def compile_module(module: nn.Module, has_sizes: bool = False) -> None:
    """Compile ``module`` when it is called, whole; for each shape, or all if it ``has_sizes``."""
    module.compile(fullgraph=True, dynamic=has_sizes, backend=BACKEND)


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
