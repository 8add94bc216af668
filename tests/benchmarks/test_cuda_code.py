"""What the blocks' generated CUDA code moves stays below limits, on a machine without a GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from benchmarks.cuda_code import predict, traffic
from benchmarks.cuda_code.__main__ import ARCHITECTURES
from benchmarks.cuda_code.own import OWN
from tests.paths import ROOT
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from fluxtrain.plan.speed import MOVED_FILE

U = 32 * 512 * 3072 * 2
LIMITS = {
    "bfloat16:single": (48, 18.2),
    "bfloat16:double": (65, 22.2),
    "tensorwise:single": (72, 14.6),
    "tensorwise:double": (98, 15.2),
    "rowwise:single": (86, 14.6),
    "rowwise:double": (125, 15.2),
    "lora:single": (88, 18.2),
    "lora:double": (95, 22.2),
}
"""Most u that a block moves, and that its forward pass saves."""
pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(
        find_spec("triton") is None or not shutil.which("gcc") or not torch.version.cuda,
        reason="torch's CUDA build, Triton or gcc is missing",
    ),
]


def test_blocks_move_and_save_no_more_than_their_limits(tmp_path: Path) -> None:
    output = tmp_path / "codes.json"
    run("cuda_code", "--blocks", *LIMITS, "--output", str(output))
    codes = json.loads(output.read_text())
    assert codes.keys() == LIMITS.keys()
    for block, (most_moved, most_saved) in LIMITS.items():
        kernels = codes[block]["kernels"]
        names = {kernel["name"] for kernel in kernels}
        assert names >= OWN.keys(), f"{block}: {names}"
        moved = sum(kernel["exact"] for kernel in kernels) / U
        assert 0.9 * most_moved < moved <= most_moved, f"{block}: the limit may only shrink"
        assert codes[block]["saved"] / U <= most_saved, block
        precision, _, kind = block.partition(":")
        both = [[k["exact"] / U for k in kernels if k["is_backward"] == part] for part in (0, 1)]
        planned = json.loads(MOVED_FILE.read_text())[precision][kind]
        assert planned == pytest.approx(list(map(sum, both)), rel=0.05), (
            "python -m benchmarks.cuda_code --update"
        )


A, B, C = (sympy.Symbol(name, integer=True, nonnegative=True) for name in "abc")


@pytest.mark.parametrize(
    ("index", "ranges", "conditions"),
    [
        (A + 8 * B + 3, {A: 4, B: 6}, []),
        (A - 4 + 8 * B, {A: 8, B: 6}, [(A, False, 4)]),
        (ModularIndexing(A, 1, 4) + 24 * ModularIndexing(A, 4, 3), {A: 24}, [(A, True, 12)]),
        (3 * FloorDiv(8 * A + B, 6) + ModularIndexing(8 * A + B, 1, 3), {A: 6, B: 8}, []),
        (B + 5 * (7 * A + C), {A: 3, B: 5, C: 7}, [(7 * A + C, True, 16)]),
        (B + 16 * FloorDiv(A, 2) + 4 * ModularIndexing(2 * A + C, 1, 4), {A: 6, B: 3, C: 2}, []),
        (9 * FloorDiv(4 * A + FloorDiv(B, 3), 8) + ModularIndexing(B, 1, 3), {A: 6, B: 12}, []),
    ],
)
def test_the_values_of_an_index_are_counted_one_by_one(
    index: sympy.Expr, ranges: dict[sympy.Symbol, int], conditions: list[traffic.Condition]
) -> None:
    access = traffic.Access("buffer", index, ranges, conditions)
    places = traffic._points(access)
    assert traffic._loops(access) is not None, "it is counted without computing each place"
    assert traffic._values([access], int(places.max()) + 1) == len(set(places.ravel().tolist()))
    other = traffic.Access("buffer", index + 1, ranges, conditions)
    both = {*places.ravel().tolist(), *(places + 1).ravel().tolist()}
    assert traffic._values([access, other], int(places.max()) + 2) == len(both)


def test_our_kernels_move_what_the_interpreter_notes() -> None:
    noted: dict[str, Any] = json.loads(run("cuda_code.addresses", TRITON_INTERPRET="1"))
    assert noted["adamw"] == {"bfloat16": 30, "float32": 34}
    assert {name for name, _, _ in noted["launches"]} == OWN.keys()
    for name, addresses, formula in noted["launches"]:
        assert addresses == formula, name


def test_predicted_steps_are_near_those_measured_on_an_h200() -> None:
    errors = {name: ms / measured - 1 for name, (ms, measured) in predict.alone().items()}
    assert errors["none"] == pytest.approx(0, abs=0.03)
    assert errors["tensorwise"] == pytest.approx(0, abs=0.11)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_kernel_of_ours_spills(architecture: str) -> None:
    registers = json.loads(run("cuda_code.registers", architecture))
    assert {name: spilled for name, (_, spilled) in registers.items() if spilled} == {}
    assert len(registers) >= len(OWN)


def run(module: str, *arguments: str, **environment: str) -> str:
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
