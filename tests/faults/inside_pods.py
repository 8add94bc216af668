"""In the image of the faults: what only the pods' own processes can do, asked for by files in the output.

torch calls `install` at the end of its import, in agents and ranks: it is an entry point of torch.backends.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

FOLDER = Path("/output/faults")
NAN_GRADIENT, SLOW_DISK = "nan_gradient", "slow_disk"
"""A gradient of NaN in each step; seconds that each fsync takes."""
GPUS = "FLUXTRAIN_GPUS"
"""The agent compares it with the visible GPUs; the nodes of the tests have none."""
CLOCK = "clock-{pod}"
"""Seconds by which the wall clock of the pod is ahead."""


def install() -> None:
    """Replace the functions that the files disturb."""
    from torch.nn.modules.module import register_module_forward_hook  # torch is loaded

    os.environ.pop(GPUS, None)
    register_module_forward_hook(_spoil_gradient)
    clock, wall_time = FOLDER / CLOCK.format(pod=socket.gethostname()), time.time
    time.time = lambda: wall_time() + _number(clock)
    slow_disk, fsync = FOLDER / SLOW_DISK, os.fsync

    def slow_fsync(file: int) -> None:
        time.sleep(_number(slow_disk))
        fsync(file)

    os.fsync = slow_fsync


def _spoil_gradient(module, inputs, output):  # type: ignore[no-untyped-def]
    if getattr(output, "requires_grad", False) and (FOLDER / NAN_GRADIENT).exists():
        output.register_hook(lambda gradient: gradient * float("nan"))


def _number(path: Path) -> float:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return 0.0
