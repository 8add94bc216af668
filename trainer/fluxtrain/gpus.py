"""The GPUs we know: dense bfloat16 peak and memory, from the vendors' data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fluxtrain.errors import ConfigError

_TERA, _GIGA = 1e12, 10**9
_SLOWER_BOARDS = {"PCIE", "NVL"}  # same name, lower peak than the modules of the table


@dataclass(frozen=True)
class Gpu:
    """One device as torch sees it."""

    name: str
    peak_flops: float
    """Dense bfloat16 FLOP/s; sparsity is no use in training."""
    memory_bytes: int
    """The data sheet's GB as 10^9 bytes: at least this much is there."""


_ROWS: list[tuple[str, float, int]] = [
    ("MI250X", 191.5, 64),  # one of its two dies: that is what torch and Kubernetes count
    ("MI300X", 1307.4, 192),
    ("MI325X", 1307.4, 256),
    ("MI355X", 2516.6, 288),
    ("H100", 989.4, 80),
    ("H200", 989.4, 141),
    ("B200", 2250.0, 180),
    ("GB200", 2500.0, 192),
    ("GB300", 2500.0, 288),
]
GPUS = {name: Gpu(name, peak * _TERA, memory * _GIGA) for name, peak, memory in _ROWS}


def find_gpu(name: str, at: str = "--gpu") -> Gpu:
    """Return the GPU called ``name``, in any case; ConfigError with the known ones for any other."""
    gpu = GPUS.get(name.strip().upper())
    if gpu is None:
        raise ConfigError(at, name, f"known: {', '.join(GPUS)}")
    return gpu


def peak_flops(device_name: str) -> float | None:
    """Return the dense bfloat16 FLOP/s of the device that torch calls ``device_name``, None if unknown."""
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    if words & _SLOWER_BOARDS:
        return None
    return next((gpu.peak_flops for name, gpu in GPUS.items() if name in words), None)
