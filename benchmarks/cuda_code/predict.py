"""Milliseconds of a step that follow from the blocks' generated code, for GPUs that were not measured.

    python -m benchmarks.cuda_code --output codes.json && python -m benchmarks.cuda_code.predict codes.json

A step is the sum of its products, attention, the bytes that its blocks move, AdamW and, of 64 GPUs, FSDP2's
copies. Launches, exposed communication, the first and the last layers are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.ceiling import ADAMW_BYTES
from benchmarks.gpu.setting import Depth, make_setting
from benchmarks.table import print_table

from fluxtrain.model.parameters import count_parameters

_RANKS = 64
_COPIES = {"bfloat16": 10.0, "tensorwise": 8.5}
"""Bytes a parameter that FSDP2 copies: gathered weights 4, or 2 if in fp8 as three quarters of FLUX.1's are,
gradients into the buffer of their reduction 6."""
_PRECISIONS = ("bfloat16", "tensorwise")


@dataclass(frozen=True)
class Rates:
    """What a GPU reaches, in FLOP/s and bytes per second."""

    bfloat16: float
    tensorwise: float
    attention: float
    bandwidth: float
    published: str = ""


H200 = Rates(661e12, 1199e12, 309e12, 4.2e12)
"""Measured (docs/log.md): means over a step's own products, attention by cuDNN, a copy."""
RATES = {
    "H200": H200,
    "MI300X": Rates(531e12, 955e12, 220e12, 3.8e12, "7.0, 512 GPUs, micro batch 8 (Oracle, v6.0)"),
    "MI325X": Rates(632e12, 1139e12, 220e12, 4.3e12, "33.1 in fp8 (AMD, v6.0)"),
    "MI355X": Rates(1100e12, 2200e12, 440e12, 5.8e12, "78.0 in MXFP6 (Primus, a pull request)"),
}
"""Of AMD's GPUs assumed: 75 % of the most that AMD names for products (of MI355X hipBLASLt's fp8, and half of
it), 72 % of the data sheet's bandwidth, attention by AOTriton."""
_MEASURED_DEPTH: Depth = (8, 16)
_MEASURED = {"bfloat16": (503.4, 70.6, 48.5), "tensorwise": (378.5, 129.6, 89.5)}
"""Milliseconds of that depth on one H200 (docs/log.md), and the u that its double and single blocks moved."""
_UNIT = 32 * 512 * 3072 * 2


def milliseconds(
    moved: Mapping[str, float], precision: str, rates: Rates, depth: Depth, ranks: int
) -> float:
    """Return a step's milliseconds at micro batch 32.

    ``moved`` are the bytes of a block by its name, such as ``tensorwise:single``.
    """
    setting = make_setting(toy=False, batch=None, latent=None, text=None).at(depth)
    tokens, width = setting.image_tokens + setting.text, setting.model.hidden_size
    attention = 3 * 4 * tokens**2 * width * sum(depth) * setting.batch
    products = setting.flops * setting.batch - attention
    parameters = count_parameters(setting.model).total
    double, single = (moved[f"{precision}:{kind}"] for kind in ("double", "single"))
    copied = depth[0] * double + depth[1] * single
    copied += parameters * (ADAMW_BYTES / ranks + (_COPIES[precision] if ranks > 1 else 0))
    rate: float = getattr(rates, precision)
    return 1e3 * (products / rate + attention / rates.attention + copied / rates.bandwidth)


def alone() -> dict[str, tuple[float, float]]:
    """Return the milliseconds on one H200 by precision: predicted from that day's code, and measured."""
    found = {}
    for precision, (measured, double, single) in _MEASURED.items():
        moved = {f"{precision}:double": double * _UNIT, f"{precision}:single": single * _UNIT}
        found[precision] = milliseconds(moved, precision, H200, _MEASURED_DEPTH, 1), measured
    return found


def main() -> int:
    """Print the H200's prediction beside what was measured, then those of one of 64 GPUs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("codes", type=Path, help="what `benchmarks.cuda_code --output` has written")
    moved = bytes_of(json.loads(parser.parse_args().codes.read_text()))
    for precision, (predicted, measured) in alone().items():
        error = f"{predicted / measured - 1:+.1%}"
        print(
            f"8+16 blocks on one H200, {precision}: {predicted:.0f} ms, measured {measured} ({error})"
        )
    rows = []
    for name, rates in RATES.items():
        both = [milliseconds(moved, each, rates, (19, 38), _RANKS) for each in _PRECISIONS]
        cells = [cell for ms in both for cell in (f"{ms:.0f}", f"{32e3 / ms:.1f}")]
        rows.append([name, *cells, rates.published])
    head = ["one of 64", "bf16 ms", "samples/s", "fp8 ms", "samples/s", "published samples/s"]
    print_table("19+38 blocks, micro batch 32, predicted", head, rows)
    return 0


def bytes_of(codes: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes that each of ``codes`` moves."""
    return {name: sum(each["exact"] for each in code["kernels"]) for name, code in codes.items()}


if __name__ == "__main__":
    sys.exit(main())
