"""The autoencoder that the config names, whichever kind it is."""

from __future__ import annotations

from pathlib import Path

from fluxtrain.contract.config import EncodersConfig
from fluxtrain.encode.autoencoder import Autoencoder, load_autoencoder
from fluxtrain.encode.patch import PatchAutoencoder, load_patch_autoencoder

Codec = Autoencoder | PatchAutoencoder


def load_codec(encoders: EncodersConfig, models_root: Path) -> Codec:
    """Return the frozen autoencoder in ``encoders.autoencoder``; DataError where the file is not one."""
    path = models_root / encoders.autoencoder
    if encoders.autoencoder_kind == "patch":
        return load_patch_autoencoder(path)
    return load_autoencoder(path)
