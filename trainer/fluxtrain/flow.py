"""Rectified flow: the straight line from clean latents (t=0) to noise (t=1).

Axes: b batch, ch h w latent image.
"""

from __future__ import annotations

import math

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from fluxtrain.contract.run.flow import LossWeighting
from fluxtrain.draws import resolution_mu

_LEAST_TIME = 1e-3
"""Least t in weights: FLUX.1's schedules have a thousand timesteps."""

Latents = Float[Tensor, "b ch h w"]
PerSample = Float[Tensor, " b"]


def sample_latents(
    mean: Latents, logvar: Latents, latent_noise: Latents, shift: float, scale: float
) -> Latents:
    """Return latents sampled from the autoencoder's normal distribution, shifted and scaled for the model."""
    return (mean + torch.exp(0.5 * logvar) * latent_noise - shift) * scale


def interpolate(clean: Latents, noise: Latents, t: PerSample) -> Latents:
    """Return the point at time ``t`` on the line from ``clean`` to ``noise``."""
    t = rearrange(t, "b -> b 1 1 1")
    return (1 - t) * clean + t * noise


def velocity(clean: Latents, noise: Latents) -> Latents:
    """Return d/dt of :func:`interpolate`: constant along the line, and the model's target."""
    return noise - clean


def sampling_times(num_steps: int, image_tokens: int, time_shift: str) -> Float[Tensor, " n"]:
    """Return the ``num_steps`` + 1 timesteps of Euler's method, from noise (1) to clean (0).

    ``none``: equal steps (FLUX.1 schnell). ``dev``: shifted towards noise, more so for more tokens:
    exp(mu) t / (1 + (exp(mu) - 1) t), mu linear from 0.5 at 256 tokens to 1.15 at 4096.
    """
    times = torch.linspace(1, 0, num_steps + 1)
    if time_shift == "none":
        return times
    factor = math.exp(resolution_mu(image_tokens))
    return factor * times / (1 + (factor - 1) * times)


def loss_weights(timesteps: PerSample, weighting: LossWeighting) -> PerSample:
    """Return the weight of each sample's loss at its timestep."""
    if weighting == "sigma_sqrt":
        return timesteps.clamp(min=_LEAST_TIME) ** -2.0
    if weighting == "cosmap":
        return 2 / (math.pi * (1 - 2 * timesteps + 2 * timesteps**2))
    return torch.ones_like(timesteps)


def sample_losses(
    prediction: Latents, target: Latents, mask: Float[Tensor, "b h w"] | None = None
) -> PerSample:
    """Return each sample's mean squared error over all its elements, in float32.

    ``mask`` weighs the elements; the mean is over all of them, also those of weight 0, as kohya's is.
    """
    errors = (prediction.float() - target.float()).square()
    if mask is not None:
        errors = errors * rearrange(mask.float(), "b h w -> b 1 h w")
    return errors.mean(dim=(1, 2, 3))
