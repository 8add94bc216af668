"""Registers of the trainer's own kernels, compiled by Triton for a GPU that is not there.

    python -m benchmarks.cuda_code.registers {sm_90,gfx942,gfx950}

Prints JSON: registers of a thread and spilled values, by kernel. One architecture a process: Triton keeps
what it learned of the first AMD one.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from tempfile import NamedTemporaryFile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from fluxtrain.model import kernels, modulation
from fluxtrain.optim import fused

_TARGETS = {"sm_90": GPUTarget("cuda", 90, 32)} | {
    name: GPUTarget("hip", name, 64) for name in ("gfx942", "gfx950")
}
_TABLES = {
    "cos": "*fp32",
    "sin": "*fp32",
    "scale_sums": "*fp32",
    "bias_sums": "*fp32",
    "largest": "*fp32",
    "sums": "*fp32",
}
_ODD = {"first", "n", "count"}
"""Numbers that need not be multiples of 16."""
_HEADS = {"width": 128, "tokens": kernels._TOKENS, "rows": kernels._ROWS}
_GRADIENTS = {**_HEADS, "steps": kernels._STEPS, "has_bias": True, "has_largest": True}
_MODULATION = {"width": 3072, "padded": 4096, "steps": modulation._STEPS, "has_sums": True}
_ADAMW = {"chunk": fused._CHUNK, "block": fused._BLOCK, "has_copy": True, "is_aligned": True}
_POINTERS = {
    "table": "*i64",
    "chunks": "*i64",
    "factors": "*fp32",
    "numbers": "*fp32",
    **_TABLES,
    **dict.fromkeys(("x", "y", "q_scale", "k_scale", "dq", "dk", "dv", "da", "dx"), "*bf16"),
    **dict.fromkeys(("dy", "residual", "scale"), "*bf16"),
}
_FLOATS = {"eps", "base_rate", "weight_decay", "beta2", "gain1", "gain2"}
CASES: dict[str, tuple[Any, Mapping[str, Any]]] = {
    "heads": (kernels._write_heads, {**_HEADS, "heads": 24}),
    "gradients, single": (kernels._write_gradients, {**_GRADIENTS, "heads": 24, "hidden": 96}),
    "gradients, joint": (kernels._write_gradients, {**_GRADIENTS, "heads": 24, "hidden": 0}),
    "gradients, GELU": (kernels._write_gradients, {**_GRADIENTS, "heads": 0, "hidden": 96}),
    "modulation": (modulation._write_modulation, _MODULATION),
    "AdamW, bfloat16": (fused._adamw, {**_ADAMW, "is_narrow": True}),
    "AdamW, float32": (fused._adamw, {**_ADAMW, "is_narrow": False}),
}
"""Kernels with their constants, at FLUX.1's size."""


def main() -> int:
    """Print the registers of all kernels."""
    (architecture,) = sys.argv[1:]
    found = {name: _compiled(architecture, *case) for name, case in CASES.items()}
    print(json.dumps(found))
    return 0


def _compiled(architecture: str, kernel: Any, constants: Mapping[str, Any]) -> tuple[int, int]:
    """Return the registers of a thread, and what is spilled: bytes on NVIDIA's, registers on AMD's."""
    names = kernel.arg_names
    kinds = {name: "constexpr" if name in constants else _kind(name) for name in names}
    even = [[("tt.divisibility", 16)], []]
    attributes = {
        (i,): [list(each) for each in even[name in _ODD or name in _FLOATS]]
        for i, name in enumerate(names)
        if name not in constants
    }
    positions = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, kinds, positions, attributes)
    options = {"num_warps": modulation._WARPS if constants is _MODULATION else 4}
    built = triton.compile(source, target=_TARGETS[architecture], options=options)
    if architecture.startswith("gfx"):
        keys = "vgpr_count", "vgpr_spill_count"
        registers, spilled = (re.search(rf"\.{key}:\s+(\d+)", built.asm["amdgcn"]) for key in keys)
    else:
        report = _assembled(built.asm["ptx"], _TARGETS[architecture])
        patterns = r"Used (\d+) registers", r"(\d+) bytes spill stores"
        registers, spilled = (re.search(pattern, report) for pattern in patterns)
    return int(registers[1]), int(spilled[1])  # type: ignore[index]


def _kind(name: str) -> str:
    return _POINTERS.get(name) or ("fp32" if name in _FLOATS else "i32")


def _assembled(code: str, target: GPUTarget) -> str:
    """Return what NVIDIA's assembler, as Triton calls it, says of ``code``."""
    program = get_ptxas(target.arch).path
    options = ["--verbose", f"--gpu-name=sm_{target.arch}a", "--regAllocOptLevel=2"]
    with NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(code)
        file.flush()
        command = [program, *options, file.name, "--output-file", "/dev/null"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


if __name__ == "__main__":
    sys.exit(main())
