"""A small autoencoder of flat images: a linear code of 8 x 8 patches, corrected by convolutions.

Its linear half is computed (principal components), so fitting the rest takes seconds.
Axes: b batch, H W image, h w latent (an eighth of the image), ch latent channels.
"""

from __future__ import annotations

from pathlib import Path

import torch
from jaxtyping import Float
from safetensors.torch import load, save
from torch import Tensor, nn

from fluxtrain.errors import DataError
from fluxtrain.files import atomic_write

PATCH = 8
"""Side in pixels of the patch that one latent position encodes."""

Images = Float[Tensor, "b 3 H W"]
Latents = Float[Tensor, "b ch h w"]


class Residual(nn.Module):
    """Two 3 x 3 convolutions added to the input; their sum is zero at initialization."""

    def __init__(self, width: int) -> None:
        """Make the layers for ``width`` channels."""
        super().__init__()
        self.widen = nn.Conv2d(width, width, 3, padding=1)
        self.narrow = nn.Conv2d(width, width, 3, padding=1)
        zero_init(self.narrow)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        """Return ``x`` plus the correction."""
        silu = nn.functional.silu
        corrected: Tensor = x + self.narrow(silu(self.widen(silu(x))))
        return corrected


class PatchAutoencoder(nn.Module):
    """Images in [-1, 1] to latents of mean 0 and variance 1, and back.

    Either way is a sum: a linear map of each patch, and a convolutional correction from its neighbours.
    """

    latent_mean: Tensor
    latent_std: Tensor
    logvar: Tensor

    def __init__(self, channels: int = 16, fine: int = 48, coarse: int = 128) -> None:
        """Make ``channels`` latent channels; ``fine`` and ``coarse`` are the decoder's widths."""
        super().__init__()
        half, patch_pixels = PATCH // 2, 3 * PATCH**2
        self.analysis = nn.Sequential(
            nn.PixelUnshuffle(PATCH), nn.Conv2d(patch_pixels, channels, 1)
        )
        self.synthesis = nn.Sequential(nn.Conv2d(channels, patch_pixels, 1), nn.PixelShuffle(PATCH))
        self.encoder = nn.Sequential(
            nn.PixelUnshuffle(half),
            nn.Conv2d(3 * half**2, 32, 3, padding=1),
            nn.SiLU(),
            nn.PixelUnshuffle(2),
            nn.Conv2d(128, 64, 1),
            Residual(64),
            nn.SiLU(),
            nn.Conv2d(64, channels, 1),
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(channels, coarse, 3, padding=1),
            Residual(coarse),
            Residual(coarse),
            nn.SiLU(),
            nn.Conv2d(coarse, 4 * fine, 1),
            nn.PixelShuffle(2),
            Residual(fine),
            nn.SiLU(),
            nn.Conv2d(fine, 3 * half**2, 3, padding=1),
            nn.PixelShuffle(half),
        )
        self.register_buffer("latent_mean", torch.zeros(1, channels, 1, 1))
        self.register_buffer("latent_std", torch.ones(1, channels, 1, 1))
        self.register_buffer("logvar", torch.tensor(-20.0))

    def encode(self, images: Images) -> tuple[Latents, Latents]:
        """Return mean and log variance of the latents of ``images``; the variance is the same for all."""
        latents = self.analysis(images) + self.encoder(images)
        mean = (latents - self.latent_mean) / self.latent_std
        return mean, self.logvar.expand_as(mean)

    def decode(self, latents: Latents) -> Images:
        """Return the images of ``latents``; values may be slightly outside of [-1, 1]."""
        raw = latents * self.latent_std + self.latent_mean
        images: Tensor = self.synthesis(raw) + self.decoder(raw)
        return images


def zero_init(layer: nn.Conv2d) -> None:
    """Set weight and bias of ``layer`` to zero."""
    nn.init.zeros_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def save_patch_autoencoder(path: Path, autoencoder: PatchAutoencoder) -> None:
    """Write the weights to ``path`` as safetensors, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial:
        # save_file makes it readable by its user only, and a pod may run as another user.
        partial.write_bytes(save({k: v.contiguous() for k, v in autoencoder.state_dict().items()}))


def load_patch_autoencoder(path: Path) -> PatchAutoencoder:
    """Return the frozen autoencoder in ``path``; DataError if it is missing or another model's."""
    autoencoder = PatchAutoencoder()
    try:
        autoencoder.load_state_dict(load(path.read_bytes()))
    except FileNotFoundError:
        raise DataError(
            f"{path}: missing; `fluxtrain prepare openmoji` makes the patch autoencoder"
        ) from None
    except Exception as error:  # safetensors and torch raise many types
        raise DataError(f"{path}: does not hold a patch autoencoder ({error})") from None
    return autoencoder.eval().requires_grad_(False)
