"""Loads the autoencoder of the config, of either kind.

Axes: b batch, ch h w latent image, H W image.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from fluxtrain.contract.run.encoders import EncodersConfig
from fluxtrain.encode.autoencoder import Autoencoder, load_autoencoder
from fluxtrain.encode.patch import PatchAutoencoder, load_patch_autoencoder

Codec = Autoencoder | PatchAutoencoder
Decoder = Callable[[Float[Tensor, "b ch h w"]], Float[Tensor, "b 3 H W"]]


def load_codec(encoders: EncodersConfig, models_root: Path) -> Codec:
    """Return the frozen autoencoder in ``encoders.autoencoder``; DataError if the file is not one."""
    path = models_root / encoders.autoencoder
    if encoders.autoencoder_kind == "patch":
        return load_patch_autoencoder(path)
    return load_autoencoder(path)


def load_decoder(encoders: EncodersConfig, models_root: Path, device: torch.device) -> Decoder:
    """Return the decoder of ``encoders.autoencoder``; DataError if the file is not an autoencoder's."""
    return load_codec(encoders, models_root).to(device).decode
