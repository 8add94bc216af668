"""Packed latents, the model's image tokens: 2 x 2 patches, and their position ids.

Axes: b batch, ch latent channels, h w latent image, n image tokens, l text tokens, c packed channels.
"""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor


def pack(latents: Float[Tensor, "b ch h w"]) -> Float[Tensor, "b n c"]:
    """Pack each 2x2 patch of latents into one token, row by row."""
    return rearrange(latents, "b ch (h ph) (w pw) -> b (h w) (ch ph pw)", ph=2, pw=2)


def unpack(img: Float[Tensor, "b n c"], height: int, width: int) -> Float[Tensor, "b ch h w"]:
    """Return the latents, ``height`` x ``width``, that :func:`pack` packed into ``img``."""
    return rearrange(
        img, "b (h w) (ch ph pw) -> b ch (h ph) (w pw)", h=height // 2, w=width // 2, ph=2, pw=2
    )


def image_ids(height: int, width: int) -> Float[Tensor, "n 3"]:
    """Return (0, row, column) of each token of a latent ``height`` x ``width``."""
    rows, columns = torch.meshgrid(
        torch.arange(height // 2, dtype=torch.float32),
        torch.arange(width // 2, dtype=torch.float32),
        indexing="ij",
    )
    ids = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1)
    return rearrange(ids, "h w three -> (h w) three")


def text_ids(length: int) -> Float[Tensor, "l 3"]:
    """Return the position ids of text tokens: all zero, so they are not rotated."""
    return torch.zeros(length, 3)
