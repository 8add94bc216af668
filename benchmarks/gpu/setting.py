"""What is measured: the model with its weights, the batch, the device; and what the report says of both.

Weights and inputs are the same for every contender: random, none of them zero. FLUX starts with zeros in its
modulations and last layer, and a GPU multiplies zeros with less power, so faster, than numbers.
"""

from __future__ import annotations

import platform
import subprocess
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from fluxtrain.contract.run.config import RunConfig, Sharding
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.dataset import Batch
from fluxtrain.model.cost import training_flops
from fluxtrain.model.flux import Flux
from fluxtrain.runtime.devices import memory_of, peak_flops
from fluxtrain.train.memory import memory, settle_resharding

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
TOY_DEPTH: Depth = (2, 2)
DEPTHS: tuple[Depth, ...] = ((8, 16), (6, 12), (4, 8), (2, 4))
"""Those that are chosen from, the largest that fits first; their halves are numbers of blocks too."""
_USABLE = 0.8
"""Fraction of the GPU's memory that our step may need: torchtitan's and diffusers' need more."""
_TIMESTEPS = (1 / 2, 1 / 4, 1 / 8, 1 / 16)
"""They, and 1000 times them, are the same in bfloat16, to which torchtitan's FSDP2 casts both."""


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
            "flow": {"reference_rounding": False},  # the others mix latents and noise in float32
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


def deepest(setting: Setting, memory_bytes: int | None) -> Depth:
    """Return the depth of `DEPTHS` at which our step fits into a GPU with ``memory_bytes``.

    The largest if that is None, as on a CPU; the smallest if none fits.
    """
    room = float("inf") if memory_bytes is None else _USABLE * memory_bytes
    fitting = (depth for depth in DEPTHS if _step_bytes(setting.at(depth)) <= room)
    return next(fitting, DEPTHS[-1])


def _step_bytes(setting: Setting) -> int:
    config = settle_resharding(setting.config(), 1, 1, None)
    return memory(config, Sharding.of(config, 1, 1), setting.batch, accumulates=False).total


def halves(depth: Depth) -> tuple[Depth, ...]:
    """Return ``depth``, with half of its double-stream blocks, and with half of its single-stream blocks."""
    double, single = depth
    return depth, (double // 2, single), (double, single // 2)


def gpu_memory() -> int | None:
    """Return the bytes of memory that the driver reports; None without a GPU."""
    return memory_of(device())


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


def random_weights(config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter's name and value in float32; a value depends on its name only."""
    with torch.device("meta"):
        model = Flux(config)
    for name, parameter in model.named_parameters():
        yield name, _uniform(name, parameter.shape)


def random_batch(setting: Setting) -> Batch:
    """Return a batch on the device."""
    size, side = setting.batch, setting.latent
    channels = setting.model.in_channels // 4

    def normal(name: str, *shape: int) -> Tensor:
        return torch.randn((size, *shape), generator=_generator(name), device=device())

    return Batch(
        mean=normal("mean", channels, side, side),
        logvar=normal("logvar", channels, side, side) - 4,
        txt=normal("txt", setting.text, setting.model.context_in_dim) / 4,
        vec=normal("vec", setting.model.vec_in_dim),
        latent_noise=normal("latent_noise", channels, side, side),
        noise=normal("noise", channels, side, side),
        timesteps=torch.tensor([_TIMESTEPS[i % 4] for i in range(size)], device=device()),
        weights=torch.ones(size, device=device()),
        keys=torch.zeros(size, dtype=torch.int64, device=device()),
        dropped=torch.zeros(size, dtype=torch.bool, device=device()),
        indices=torch.arange(size, device=device()),
    )


def _uniform(name: str, shape: torch.Size) -> Tensor:
    value = torch.empty(shape, device=device())
    if len(shape) == 1:  # biases and norms
        return value.uniform_(0.2, 0.8, generator=_generator(name))
    bound = (3 / shape[1]) ** 0.5
    return value.uniform_(-bound, bound, generator=_generator(name))


def _generator(name: str) -> torch.Generator:
    return torch.Generator(device()).manual_seed(zlib.crc32(name.encode()))
