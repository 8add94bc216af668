"""Fits the patch autoencoder to a set of pictures in seconds: principal components first, then AdamW.

Axes: n images, b batch, H W image, p patches, f values of one patch, ch latent channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from einops import rearrange
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from fluxtrain.encode.patch import PATCH, PatchAutoencoder, zero_init

Pixels = UInt8[Tensor, "n 3 H W"]
Images = Float[Tensor, "b 3 H W"]


@dataclass(frozen=True)
class FitSettings:
    """How the autoencoder is fitted; every value was chosen by measurement (docs/log.md)."""

    steps: int = 450
    batch_size: int = 32
    learning_rate: float = 2e-3
    latent_noise: float = 0.1
    """Standard deviation of noise on the latents: the decoder must bear what a model gets wrong."""
    absolute_weight: float = 0.5
    """Weight of the absolute error beside the squared one: crisper lines."""
    seed: int = 0


def fit_patch_autoencoder(
    pixels: Pixels, settings: FitSettings, advance: Callable[[int], None] = lambda steps: None
) -> PatchAutoencoder:
    """Return an autoencoder of ``pixels``; its latents have mean 0 and variance 1 over them."""
    rng = torch.Generator().manual_seed(settings.seed)
    torch.manual_seed(settings.seed)  # the layers' own initial weights
    autoencoder = PatchAutoencoder().to(memory_format=torch.channels_last)
    init_from_principal_components(autoencoder, pixels)
    optimizer = torch.optim.AdamW(
        autoencoder.parameters(),
        lr=settings.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=1e-3,
        fused=True,
    )
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * _schedule(step / settings.steps)
        images = _augmented(pixels, settings.batch_size, rng)
        _step(autoencoder, optimizer, images, settings, rng)
        advance(1)
    standardize_latents(autoencoder, pixels)
    nn.init.constant_(autoencoder.logvar, 2 * math.log(settings.latent_noise))
    return autoencoder.eval().requires_grad_(False)


def to_images(pixels: Pixels) -> Images:
    """Return 8-bit pixels as floats in [-1, 1]."""
    return pixels.float() / 127.5 - 1


@torch.no_grad()
def init_from_principal_components(autoencoder: PatchAutoencoder, pixels: Pixels) -> None:
    """Set the linear half to the patches' principal components, and let the other half be zero_init."""
    into, out = cast(nn.Conv2d, autoencoder.analysis[1]), cast(nn.Conv2d, autoencoder.synthesis[0])
    patches = nn.functional.pixel_unshuffle(to_images(pixels), PATCH)
    patches = rearrange(patches, "n f h w -> (n h w) f")
    mean = patches.mean(0)
    variances, axes = torch.linalg.eigh(torch.cov(patches.T))
    variances, axes = variances.flip(0)[: into.out_channels], axes.flip(1)[:, : into.out_channels]
    # Between equal variances and the pictures' own: large strokes matter more, but details must
    # not drown in the noise. One scalar then makes the mean variance 1.
    scale = variances.clamp_min(1e-6) ** -0.25
    scale /= (variances * scale.square()).mean().sqrt()
    into.weight.copy_(rearrange(axes * scale, "f ch -> ch f 1 1"))
    cast(Tensor, into.bias).copy_(-(mean @ axes) * scale)
    out.weight.copy_(rearrange(axes / scale, "f ch -> f ch 1 1"))
    cast(Tensor, out.bias).copy_(mean)
    zero_init(cast(nn.Conv2d, autoencoder.encoder[-1]))
    zero_init(cast(nn.Conv2d, autoencoder.decoder[-2]))


@torch.no_grad()
def standardize_latents(autoencoder: PatchAutoencoder, pixels: Pixels) -> None:
    """Let :meth:`PatchAutoencoder.encode` give mean 0 per channel and variance 1 over all of ``pixels``."""
    chunks = torch.split(to_images(pixels), 256)
    latents = torch.cat([autoencoder.encode(chunk)[0] for chunk in chunks])
    autoencoder.latent_mean.copy_(latents.mean((0, 2, 3), keepdim=True))
    autoencoder.latent_std.fill_((latents - autoencoder.latent_mean).std().item())


def _schedule(progress: float) -> float:
    """Warm up over the first twentieth, then fall to zero in a straight line."""
    return min(1.0, 20 * progress + 0.02) * (1 - progress)


def _augmented(pixels: Pixels, batch_size: int, rng: torch.Generator) -> Images:
    """Return random pictures, moved by up to 6 pixels, mirrored or recoloured: codes know no names."""
    picked = torch.randint(len(pixels), (batch_size,), generator=rng)
    down, right = torch.randint(-6, 7, (2,), generator=rng).tolist()
    mirror, recolour = (torch.rand(2, generator=rng) < torch.tensor([0.5, 0.3])).tolist()
    images = to_images(pixels[picked]).roll((down, right), (2, 3))
    if mirror:
        images = images.flip(3)
    if recolour:
        images = images[:, torch.randperm(3, generator=rng)]
    return images.contiguous(memory_format=torch.channels_last)


def _step(
    autoencoder: PatchAutoencoder,
    optimizer: torch.optim.AdamW,
    images: Images,
    settings: FitSettings,
    rng: torch.Generator,
) -> None:
    latents, _ = autoencoder.encode(images)
    noise = settings.latent_noise * torch.randn(latents.shape, generator=rng)
    error = autoencoder.decode(latents + noise) - images
    # Latents are held near variance 1, or they would grow until the noise no longer matters.
    loss = error.square().mean() + settings.absolute_weight * error.abs().mean()
    loss = loss + 1e-3 * latents.square().mean()
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(autoencoder.parameters(), 1.0)
    optimizer.step()
