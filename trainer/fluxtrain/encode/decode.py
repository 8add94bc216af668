"""Latents back to pictures, by whichever autoencoder the config names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from fluxtrain.contract.config import EncodersConfig
from fluxtrain.encode.codec import load_codec

Decoder = Callable[[Float[Tensor, "b ch h w"]], Float[Tensor, "b 3 H W"]]


def load_decoder(encoders: EncodersConfig, models_root: Path, device: torch.device) -> Decoder:
    """Return the decoder of ``encoders.autoencoder``; DataError where the file is not one."""
    return load_codec(encoders, models_root).to(device).decode
