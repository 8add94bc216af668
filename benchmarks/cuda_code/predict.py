"""Milliseconds of a step as `fluxtrain plan` predicts them, beside what was measured and published.

    python -m benchmarks.cuda_code.predict

Launches, exposed communication, the first and the last layers are left out.
"""

from __future__ import annotations

import sys

from benchmarks.gpu.setting import Depth, make_setting
from benchmarks.table import print_table

from fluxtrain.contract.run.config import Sharding
from fluxtrain.plan.speed import Moved, predicted_seconds
from fluxtrain.runtime.devices import find_gpu

_BATCH, _RANKS, _RANKS_PER_NODE = 32, 64, 8
_DEPTH: Depth = (19, 38)
_PUBLISHED = {
    "H200": "",
    "MI300X": "7.0, 512 GPUs, micro batch 8 (Oracle, v6.0)",
    "MI325X": "33.1 in fp8 (AMD, v6.0)",
    "MI355X": "78.0 in MXFP6 (Primus, a pull request)",
}
_MEASURED_DEPTH: Depth = (8, 16)
_MEASURED = {"none": (503.4, 70.6, 48.5), "tensorwise": (378.5, 129.6, 89.5)}
"""Milliseconds of that depth on one H200 (docs/log.md), and the u that its double and single blocks moved."""


def milliseconds(gpu: str, fp8: str, depth: Depth, ranks: int, moved: Moved | None = None) -> float:
    """Return those of a step at micro batch 32 on each of ``ranks``."""
    setting = make_setting(toy=False, batch=None, latent=None, text=None).at(depth)
    config = setting.config({"precision.fp8": fp8, "schedule.global_batch_size": ranks * _BATCH})
    sharding = Sharding.of(config, ranks, min(ranks, _RANKS_PER_NODE))
    seconds = predicted_seconds(config, find_gpu(gpu), sharding, _BATCH, 1, moved)
    assert seconds is not None, "a GPU whose rates are known"
    return 1e3 * seconds


def alone() -> dict[str, tuple[float, float]]:
    """Return the milliseconds on one H200 by recipe of fp8: predicted from that day's code, and measured."""
    found = {}
    for fp8, (measured, double, single) in _MEASURED.items():
        moved = {"double": [0.0, double], "single": [0.0, single]}
        moved_of = {"bfloat16" if fp8 == "none" else fp8: moved}
        found[fp8] = milliseconds("H200", fp8, _MEASURED_DEPTH, 1, moved_of), measured
    return found


def main() -> int:
    """Print the H200's prediction beside what was measured, then those of one of 64 GPUs."""
    for fp8, (predicted, measured) in alone().items():
        error = f"{predicted / measured - 1:+.1%}"
        print(
            f"8+16 blocks on one H200, fp8 {fp8}: {predicted:.0f} ms, measured {measured} ({error})"
        )
    rows = []
    for gpu, published in _PUBLISHED.items():
        both = [milliseconds(gpu, fp8, _DEPTH, _RANKS) for fp8 in _MEASURED]
        cells = [cell for ms in both for cell in (f"{ms:.0f}", f"{1e3 * _BATCH / ms:.1f}")]
        rows.append([gpu, *cells, published])
    head = ["one of 64", "bf16 ms", "samples/s", "fp8 ms", "samples/s", "published samples/s"]
    print_table("19+38 blocks, micro batch 32, predicted", head, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
