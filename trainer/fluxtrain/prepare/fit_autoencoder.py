"""Fits the patch autoencoder to a set of images in seconds: principal components first, then AdamW.

At last its decoder alone is fitted to noisier latents, as a model's are: grounds get clean and colours
even, and encodings stay what they are.

Axes: n images, b batch, H W image, p patches, f values of one patch, ch latent channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from einops import rearrange
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from fluxtrain.encode.codec import PATCH, PatchAutoencoder, zero_init

Pixels = UInt8[Tensor, "n 3 H W"]
Images = Float[Tensor, "b 3 H W"]


@dataclass(frozen=True)
class FitSettings:
    """Hyperparameters of the fit, chosen by measurement (docs/log.md)."""

    steps: int = 300
    decoder_steps: int = 220
    batch_size: int = 32
    learning_rate: float = 2e-3
    latent_noise: float = 0.1
    """Standard deviation of the noise on the latents, whose variance is 1: keeps errors of a model small."""
    decoder_noise: float = 0.5
    """Largest standard deviation of the noise while the decoder alone is fitted; the smallest is 0."""
    absolute_weight: float = 0.5
    """Weight of the absolute error, added to the squared one: sharper lines."""
    seed: int = 0


def fit_patch_autoencoder(
    pixels: Pixels, settings: FitSettings, advance: Callable[[int], None] = lambda steps: None
) -> PatchAutoencoder:
    """Return an autoencoder fitted to ``pixels``, whose latents have mean 0 and variance 1."""
    rng = torch.Generator().manual_seed(settings.seed)
    torch.manual_seed(settings.seed)  # the layers' initial weights
    autoencoder = PatchAutoencoder().to(memory_format=torch.channels_last)
    init_from_principal_components(autoencoder, pixels)
    fit = partial(_fit, autoencoder, pixels, settings, rng, advance)
    fit([*autoencoder.parameters()], settings.steps, (settings.latent_noise, settings.latent_noise))
    standardize_latents(autoencoder, pixels)
    decoder = [*autoencoder.synthesis.parameters(), *autoencoder.decoder.parameters()]
    fit(decoder, settings.decoder_steps, (0.0, settings.decoder_noise))
    nn.init.constant_(autoencoder.logvar, 2 * math.log(settings.latent_noise))
    return autoencoder.eval().requires_grad_(False)


def to_images(pixels: Pixels) -> Images:
    """Return 8-bit pixels as floats in [-1, 1]."""
    return pixels.float() / 127.5 - 1


@torch.no_grad()
def init_from_principal_components(autoencoder: PatchAutoencoder, pixels: Pixels) -> None:
    """Set the linear half to the patches' principal components and the convolutional half to zero."""
    analysis = cast(nn.Conv2d, autoencoder.analysis[1])
    synthesis = cast(nn.Conv2d, autoencoder.synthesis[0])
    patches = nn.functional.pixel_unshuffle(to_images(pixels), PATCH)
    patches = rearrange(patches, "n f h w -> (n h w) f")
    mean = patches.mean(0)
    variances, axes = torch.linalg.eigh(torch.cov(patches.T))
    variances = variances.flip(0)[: analysis.out_channels]
    axes = axes.flip(1)[:, : analysis.out_channels]
    # A compromise between equal variances and the images' own: large shapes matter more, but details
    # must exceed the noise. One scalar then makes the mean variance 1.
    scale = variances.clamp_min(1e-6) ** -0.25
    scale /= (variances * scale.square()).mean().sqrt()
    analysis.weight.copy_(rearrange(axes * scale, "f ch -> ch f 1 1"))
    cast(Tensor, analysis.bias).copy_(-(mean @ axes) * scale)
    synthesis.weight.copy_(rearrange(axes / scale, "f ch -> f ch 1 1"))
    cast(Tensor, synthesis.bias).copy_(mean)
    zero_init(cast(nn.Conv2d, autoencoder.encoder[-1]))
    zero_init(cast(nn.Conv2d, autoencoder.decoder[-2]))


@torch.no_grad()
def standardize_latents(autoencoder: PatchAutoencoder, pixels: Pixels) -> None:
    """Set the buffers so that ``encode`` returns mean 0 per channel and variance 1 over all of ``pixels``."""
    chunks = torch.split(to_images(pixels), 256)
    latents = torch.cat([autoencoder.encode(chunk)[0] for chunk in chunks])
    autoencoder.latent_mean.copy_(latents.mean((0, 2, 3), keepdim=True))
    autoencoder.latent_std.fill_((latents - autoencoder.latent_mean).std().item())


def _random_batch(pixels: Pixels, batch_size: int, rng: torch.Generator) -> Images:
    """Return random images, shifted by up to 6 pixels, sometimes mirrored or with permuted colours."""
    indices = torch.randint(len(pixels), (batch_size,), generator=rng)
    shift_down, shift_right = torch.randint(-6, 7, (2,), generator=rng).tolist()
    mirror, recolour = (torch.rand(2, generator=rng) < torch.tensor([0.5, 0.3])).tolist()
    images = to_images(pixels[indices]).roll((shift_down, shift_right), (2, 3))
    if mirror:
        images = images.flip(3)
    if recolour:
        images = images[:, torch.randperm(3, generator=rng)]
    return images.contiguous(memory_format=torch.channels_last)


def _fit(
    autoencoder: PatchAutoencoder,
    pixels: Pixels,
    settings: FitSettings,
    rng: torch.Generator,
    advance: Callable[[int], None],
    parameters: list[nn.Parameter],
    steps: int,
    noise: tuple[float, float],
) -> None:
    """Fit ``parameters`` with noise on the latents whose deviation is drawn between the two of ``noise``."""
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=1e-3, fused=True)
    lowest, highest = noise
    for step in range(steps):
        progress = step / steps
        # warm-up over the first 5 %, then linear decay to zero
        factor = min(1.0, 20 * progress + 0.02) * (1 - progress)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * factor
        images = _random_batch(pixels, settings.batch_size, rng)
        latents, _ = autoencoder.encode(images)
        deviations = lowest + (highest - lowest) * torch.rand(len(images), 1, 1, 1, generator=rng)
        noisy = latents + deviations * torch.randn(latents.shape, generator=rng)
        error = autoencoder.decode(noisy) - images
        # Keeps latents near variance 1: otherwise they grow until the noise has no effect.
        loss = error.square().mean() + settings.absolute_weight * error.abs().mean()
        loss = loss + 1e-3 * latents.square().mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss, inputs=parameters)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        advance(1)
