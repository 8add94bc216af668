"""All random numbers of a run: pure functions of the seed, the global batch and the position in it.

They are generated on the host by Philox (counter-based), so they do not depend on the number of ranks or
loader workers, on resumes or on the device. Each use has its own stream.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fluxtrain.contract.run.optim import FlowConfig

TRAIN, EVALUATION, ORDER, SAMPLING, SYNTHETIC, WEIGHTS, CROPS, CAPTIONS, HOLES = range(9)
"""Streams: training samples, validation samples, order of epochs, sample images, synthetic data, weights,
crops of pictures, variants of captions, holes of pictures."""

NUM_TIMESTEPS = 8
"""Evaluation timesteps: 0/8 ... 7/8."""

Array = NDArray[Any]


def generator(seed: int, stream: int, major: int, minor: int = 0) -> np.random.Generator:
    """Return the generator of ``(seed, stream, major, minor)``.

    For ``TRAIN`` major is the global batch counted from 0 and minor the position in it; for
    ``EVALUATION`` major is the sample's index; for ``ORDER`` the epoch, with minor 1 for that of its batches.
    """
    # Philox increments the lowest word of the counter; the others separate the draws
    return np.random.Generator(np.random.Philox(key=[seed, stream], counter=[0, minor, major, 0]))


@dataclass(frozen=True)
class Draw:
    """The random values of one sample of one global batch."""

    timestep: float
    dropped: bool
    latent_noise: (
        Array  # ch h w, float32: samples the latent from the autoencoder's mean and logvar
    )
    noise: Array  # ch h w, float32: the flow at t = 1
    key: int  # below 2**32: what adapters drop
    variant: float = 0.0  # in [0, 1): which of its encoded pictures and captions a sample has


def training_draw(
    seed: int, batch: int, position: int, latent_shape: tuple[int, int, int], flow: FlowConfig
) -> Draw:
    """Return the draw of the sample at ``position`` in global batch ``batch``, both from 0."""
    rng = generator(seed, TRAIN, batch, position)
    dropped = bool(rng.random() < flow.prompt_dropout)
    timestep = _timestep(rng, latent_shape, flow)
    latent_noise = rng.standard_normal(latent_shape, dtype=np.float32)
    noise = rng.standard_normal(latent_shape, dtype=np.float32)
    if flow.noise_offset:
        channels = latent_shape[0], 1, 1
        noise += flow.noise_offset * rng.standard_normal(channels, dtype=np.float32)
    key, variant = int(rng.integers(2**32)), float(rng.random())
    return Draw(timestep, dropped, latent_noise, noise, key, variant)


def evaluation_draw(
    seed: int, index: int, timestep: float, latent_shape: tuple[int, int, int]
) -> Draw:
    """Return the draw of validation sample ``index``: the same at every evaluation, without dropout."""
    rng = generator(seed, EVALUATION, index)
    latent_noise = rng.standard_normal(latent_shape, dtype=np.float32)
    noise = rng.standard_normal(latent_shape, dtype=np.float32)
    return Draw(timestep, False, latent_noise, noise, key=0)


def epoch_order(seed: int, epoch: int, num_samples: int) -> Array:
    """Return the order of samples in epoch ``epoch``, a permutation of ``range(num_samples)``."""
    return generator(seed, ORDER, epoch).permutation(num_samples)


def batch_order(seed: int, epoch: int, num_batches: int) -> Array:
    """Return the order of the batches in epoch ``epoch`` of a set of several sizes, a permutation."""
    return generator(seed, ORDER, epoch, 1).permutation(num_batches)


def _timestep(
    rng: np.random.Generator, latent_shape: tuple[int, int, int], flow: FlowConfig
) -> float:
    if flow.timestep_sampling == "uniform":
        return float(rng.random())
    if flow.timestep_sampling == "mode":
        u = float(rng.random())  # SD3, equation 20
        return 1 - u - flow.mode_scale * (math.cos(0.5 * math.pi * u) ** 2 - 1 + u)
    if flow.timestep_sampling == "cosmap":
        tangent = math.tan(0.5 * math.pi * float(rng.random()))
        return tangent / (1 + tangent)
    normal = float(rng.standard_normal())
    if flow.timestep_sampling == "logit_normal":
        return _sigmoid(flow.logit_mean + flow.logit_std * normal)
    t = _sigmoid(flow.sigmoid_scale * normal)
    if flow.timestep_sampling == "sigmoid":
        return t
    if flow.timestep_sampling == "shift":
        return shifted(t, flow.shift)
    return shifted(t, math.exp(resolution_mu(latent_shape[1] * latent_shape[2] // 4)))


def shifted(t: float, shift: float) -> float:
    """Return ``t`` moved towards noise: s t / (1 + (s - 1) t) (SD3, equation 23)."""
    return shift * t / (1 + (shift - 1) * t)


def resolution_mu(image_tokens: int) -> float:
    """Return FLUX's mu for a number of image tokens: 0.5 at 256, 1.15 at 4096, linear between."""
    return 0.5 + (1.15 - 0.5) * (image_tokens - 256) / (4096 - 256)


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))
