"""The GPUs that this process can use, and what to look at where they are fewer than were asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from fluxtrain.errors import ConfigError

_FILES = ("kfd", "dri/renderD*", "nvidia[0-9]*")
_FILTERS = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def num_visible() -> int:
    """Return the number of GPUs that torch can use here."""
    return torch.cuda.device_count()


def require_gpus(wanted: int, environment: Mapping[str, str], dev: Path = Path("/dev")) -> None:
    """Raise ConfigError, with what to look at, where torch sees fewer than ``wanted`` GPUs."""
    seen = num_visible()
    if seen >= wanted:
        return
    filters = [f"{name}={environment[name]!r}" for name in _FILTERS if name in environment]
    groups = " ".join(str(group) for group in sorted({os.getgid(), *os.getgroups()}))
    raise ConfigError(
        "spec.gpusPerNode",
        wanted,
        f"torch sees {seen} GPUs in this pod, and training on fewer, or on the CPU, is refused. Look at "
        f"the device files, which the device plugin brings: {_device_files(dev)}; "
        f"who may open them, often the groups video and render: this is user {os.getuid()} with groups "
        f"{groups}; the chart's trainer.supplementalGroups adds groups; "
        f"torch {torch.__version__} of the image, built for {_build()}; "
        f"{' '.join(filters) or ', '.join(_FILTERS) + ' (none is set)'}",
    )


def _device_files(dev: Path) -> str:
    found = [path for pattern in _FILES for path in sorted(dev.glob(pattern))]
    if not found:
        return f"none of {', '.join(str(dev / pattern) for pattern in _FILES)} is here"
    return ", ".join(f"{path}{'' if _opens(path) else ' (no access)'}" for path in found[:12])


def _opens(path: Path) -> bool:
    return os.access(path, os.R_OK | os.W_OK)


def _build() -> str:
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
