"""What a trial ran on: the device, the versions, and what was decided by them."""

from __future__ import annotations

import platform
from typing import Any

import torch

from fluxtrain.compilation import compiles
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.distributed import World


def facts(config: RunConfig, world: World) -> dict[str, Any]:
    """Return the facts, as JSON."""
    has_gpu = world.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(world.device) if has_gpu else platform.machine(),
        "device_memory_bytes": (
            torch.cuda.get_device_properties(world.device).total_memory if has_gpu else None
        ),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "compiled": compiles(config.parallel, world.device),
    }
