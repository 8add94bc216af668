"""Kernels and bytes of the blocks' generated CUDA code, on a machine without a GPU.

    python -m benchmarks.cuda_code [--blocks bfloat16:single ...] [--kernels] [--output FILE] [--update]

Inductor writes the code of the trainer's blocks at FLUX.1's size, forward and backward. u is one activation
of micro batch 32, 512 tokens and width 3072 in bfloat16, 100.7 MB. Products and attention are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cuda_code import stub

if TYPE_CHECKING:
    from benchmarks.cuda_code.generate import Code

PRECISIONS = ("bfloat16", "tensorwise", "rowwise", "lora")
"""The last is of LoRAs on frozen weights in bfloat16."""
BLOCKS = [
    f"{precision}:{kind}{torch}"
    for torch in ("", ":torch")
    for precision in PRECISIONS
    for kind in ("single", "double")
]
"""With the trainer's kernels, and with torch's only."""
ARCHITECTURES = ("sm_90", "gfx942", "gfx950")
_SMALL = 0.4
"""Fewest u of a kernel that is listed."""


def main() -> int:
    """Print a table with a line for each kind of block; of all also what our own kernels move and need."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", nargs="+", choices=BLOCKS, default=BLOCKS)
    parser.add_argument("--kernels", action="store_true", help="list them")
    parser.add_argument("--output", type=Path, help="a file in JSON")
    parser.add_argument("--update", action="store_true", help="write what `fluxtrain plan` reads")
    options = parser.parse_args()
    if options.update and options.blocks != BLOCKS:
        parser.error("--update: plan reads all blocks; leave --blocks out")
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    stub.load()
    from benchmarks.cuda_code.generate import UNIT, generate
    from benchmarks.table import print_table

    from fluxtrain.plan.speed import MOVED_FILE

    stub.complete()
    codes = {}
    for block in options.blocks:
        precision, kind, *plain = block.split(":")
        codes[block] = code = generate(kind, precision, own=not plain)
        for kernel in code.kernels if options.kernels else ():
            if kernel.by_inductor > _SMALL * UNIT:
                numbers = f"{kernel.by_inductor / UNIT:6.2f} {kernel.exact / UNIT:6.2f}"
                print(block, "backward" if kernel.is_backward else "forward ", numbers, kernel.name)
    rows = []
    for block, code in codes.items():
        sums = code.by_inductor, code.exact, code.saved
        rows.append([block, f"{len(code.kernels)}", *(f"{each / UNIT:.1f}" for each in sums)])
    head = ["block", "kernels", "u by inductor", "u exactly", "u saved"]
    print_table("What a block moves between its products, forward and backward", head, rows)
    if options.blocks == BLOCKS:
        _print_kernels()
    if options.update:
        MOVED_FILE.write_text(json.dumps(_moved(codes, UNIT), indent=1) + "\n")
    if options.output:
        options.output.write_text(json.dumps({name: asdict(each) for name, each in codes.items()}))
    return 0


def _print_kernels() -> None:
    """Print the bytes of AdamW and the registers of our kernels."""
    from benchmarks.table import print_table

    for gradients, number in _printed("addresses", TRITON_INTERPRET="1")["adamw"].items():
        print(f"AdamW moves {number:.0f} bytes a parameter and step, gradients in {gradients}")
    of_each = {architecture: _printed("registers", architecture) for architecture in ARCHITECTURES}
    rows = [
        [kernel, *(f"{registers} ({spilled} spilled)" for registers, spilled in of_one)]
        for kernel, of_one in zip(
            of_each["sm_90"], zip(*map(dict.values, of_each.values()), strict=True), strict=True
        )
    ]
    print_table("Registers of a thread", ["kernel", *ARCHITECTURES], rows)


def _moved(codes: Mapping[str, Code], unit: int) -> dict[str, dict[str, list[float]]]:
    """Return the ``unit``s that each block moves, forward and backward, by precision and kind."""
    moved: dict[str, dict[str, list[float]]] = {precision: {} for precision in PRECISIONS}
    for block in BLOCKS[: 2 * len(PRECISIONS)]:
        precision, kind = block.split(":")
        sums = [0, 0]
        for kernel in codes[block].kernels:
            sums[kernel.is_backward] += kernel.exact
        moved[precision][kind] = [round(each / unit, 1) for each in sums]
    return moved


def _printed(module: str, *arguments: str, **environment: str) -> Any:
    """Return what another module of this package prints, in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.cuda_code.{module}", *arguments]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, check=True)
    return json.loads(done.stdout)


if __name__ == "__main__":
    sys.exit(main())
