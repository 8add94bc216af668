"""What is measured: the model, the batch, the device; and what the report says of the machine."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.model.flops import training_flops
from fluxtrain.runtime.devices import peak_flops

SCHNELL = ModelConfig()
TOY = ModelConfig(
    hidden_size=64,
    num_heads=2,
    axes_dim=(8, 12, 12),
    vec_in_dim=32,
    context_in_dim=32,
    depth=19,
    depth_single_blocks=38,
)
Depth = tuple[int, int]
"""Number of double-stream and of single-stream blocks."""


@dataclass(frozen=True)
class Setting:
    """One measurement's model and batch."""

    model: ModelConfig
    batch: int
    latent: int
    """Side length of the latents: pixels / 8."""
    text: int
    """Text tokens per sample."""

    @property
    def image_tokens(self) -> int:
        """Return the image tokens of one sample."""
        return (self.latent // 2) ** 2

    @property
    def depth(self) -> Depth:
        """Return the number of blocks of both kinds."""
        return self.model.depth, self.model.depth_single_blocks

    @property
    def flops(self) -> int:
        """Return the FLOPs of one sample, forward and backward, without recomputation."""
        return training_flops(self.model, self.image_tokens, self.text)

    def at(self, depth: Depth) -> Setting:
        """Return this setting with other numbers of blocks."""
        double, single = depth
        model = self.model.model_copy(update={"depth": double, "depth_single_blocks": single})
        return replace(self, model=model)

    def config(self, overrides: dict[str, Any] | None = None) -> RunConfig:
        """Return the run of preset mlperf-schnell with this model and batch.

        ``overrides`` are fields by their dotted names, such as ``parallel.compile``.
        """
        run: dict[str, Any] = {
            "preset": "mlperf-schnell",
            "seed": 1,
            "model": self.model.model_dump(),
            "data": {"latent_size": self.latent, "text_length": self.text},
            "schedule": {"global_batch_size": self.batch, "warmup_steps": 0},
            "optim": {"learning_rate": 1e-5},  # the weights are random: larger rates diverge
            "parallel": {"micro_batch_size": self.batch},
            "flow": {"reference_rounding": False},  # the others' timesteps are not rounded
            "logging": {"mlperf": {"division": "open"}},  # the closed division has another model
        }
        for name, value in (overrides or {}).items():
            section, field = name.split(".")
            run.setdefault(section, {})[field] = value
        return resolve(run)


def make_setting(toy: bool, batch: int | None, latent: int | None, text: int | None) -> Setting:
    """Return the full model at 256 pixels, or a toy of equal depth; None takes the default."""
    if toy:
        return Setting(TOY, batch or 2, latent or 4, text or 6)
    return Setting(SCHNELL, batch or 32, latent or 32, text or 256)


def device() -> torch.device:
    """Return the GPU that is measured, or the CPU if there is none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def bf16_peak() -> float | None:
    """Return the device's dense bfloat16 FLOP/s by its data sheet; None if it is not known."""
    return peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def machine() -> dict[str, Any]:
    """Return the date, the device and the versions, for the report."""
    has_gpu = torch.cuda.is_available()
    facts: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if has_gpu else platform.machine(),
        "peak_bf16_flops": bf16_peak(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "state": gpu_state(),
    }
    if has_gpu:
        properties = torch.cuda.get_device_properties(0)
        facts["memory_bytes"] = properties.total_memory
        facts["multiprocessors"] = properties.multi_processor_count
    return facts


def gpu_state() -> str:
    """Return clocks, power and temperature by the vendor's tool; empty if there is none."""
    commands = (
        ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader"],
        ["amd-smi", "metric", "--gpu", "0", "--clock", "--power", "--temperature", "--csv"],
    )
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            return done.stdout.strip()
    return ""
