"""Weights and inputs that are the same for every contender: random, none of them zero.

FLUX starts with zeros in its modulations and last layer, and a GPU multiplies zeros with less power, so
faster, than numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
from benchmarks.gpu.setting import Setting, device
from torch import Tensor

from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.data.dataset import Batch
from fluxtrain.model.flux import Flux


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
        timesteps=torch.linspace(0.1, 0.9, size, device=device()),
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
