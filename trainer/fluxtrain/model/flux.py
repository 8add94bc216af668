"""FLUX.1's transformer, with the tensor names of BFL's files.

Axes: b batch, n image tokens, l text tokens, s = l + n, c packed channels, d hidden, a position axes.
"""

from __future__ import annotations

import math

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from fluxtrain.contract.run.model import NUM_AXES, TIMESTEP_DIM, ModelConfig
from fluxtrain.model.blocks import (
    DoubleStreamBlock,
    LastLayer,
    Rotation,
    SingleStreamBlock,
    rotation,
)
from fluxtrain.model.clip import ClipText
from fluxtrain.model.offloading import Offloading


class Flux(nn.Module):
    """Predicts the velocity of packed latents from noisy ones, text and time.

    Timestep embedding and RoPE angles are computed in float32 for any dtype of the weights.
    """

    def __init__(self, config: ModelConfig) -> None:
        """Create the layers; ``config`` has validated that heads and axes fit."""
        super().__init__()
        hidden, heads = config.hidden_size, config.num_heads
        mlp_hidden = int(hidden * config.mlp_ratio)
        eps = config.qk_norm_eps
        self.axes_dim, self.theta = config.axes_dim, config.theta
        self.img_in = nn.Linear(config.in_channels, hidden)
        self.time_in = MLPEmbedder(TIMESTEP_DIM, hidden)
        self.vector_in = MLPEmbedder(config.vec_in_dim, hidden)
        self.guidance_in = MLPEmbedder(TIMESTEP_DIM, hidden) if config.guidance_embed else None
        self.txt_in = nn.Linear(config.context_in_dim, hidden)
        self.double_blocks = nn.ModuleList(
            DoubleStreamBlock(hidden, heads, mlp_hidden, eps) for _ in range(config.depth)
        )
        self.single_blocks = nn.ModuleList(
            SingleStreamBlock(hidden, heads, mlp_hidden, eps)
            for _ in range(config.depth_single_blocks)
        )
        self.final_layer = LastLayer(hidden, config.out_channels)
        self.text_encoder: ClipText | None = None
        self.offloading: Offloading | None = None
        """The blocks whose frozen weights are in host memory, if there are some."""
        self._last_positions: tuple[Tensor, Tensor, Rotation] | None = None

    def forward(
        self,
        img: Float[Tensor, "b n c"],
        img_ids: Float[Tensor, "n a"],
        txt: Float[Tensor, "b l t"],
        txt_ids: Float[Tensor, "l a"],
        timesteps: Float[Tensor, " b"],
        y: Float[Tensor, "b v"] | Int[Tensor, "b i"],
        guidance: Float[Tensor, " b"] | None = None,
    ) -> Float[Tensor, "b n c"]:
        """Return the velocity at ``img``; ``timesteps`` run from 0 (clean) to 1 (noise).

        ``y`` is CLIP's pooled vector; or its token ids, if the model has a ``text_encoder``.
        The rotation of the last tensors of ids is kept: they must not be changed in place. Raises ValueError
        if the model needs ``guidance`` and there is none, or the reverse.
        """
        if (guidance is None) != (self.guidance_in is None):
            needed = "needs" if self.guidance_in is not None else "takes no"
            raise ValueError(f"this model {needed} guidance")
        dtype = self.img_in.weight.dtype
        if self.text_encoder is not None:
            y = self.text_encoder(y)
        img, txt = self.img_in(img.to(dtype)), self.txt_in(txt.to(dtype))
        vec = self.time_in(timestep_embedding(timesteps).to(dtype)) + self.vector_in(y.to(dtype))
        if self.guidance_in is not None and guidance is not None:
            vec = vec + self.guidance_in(timestep_embedding(guidance).to(dtype))
        positions = self._positions(img_ids, txt_ids)

        for double_block in self.double_blocks:
            img, txt = double_block(img, txt, vec, positions)
        x = torch.cat((txt, img), dim=1)
        for single_block in self.single_blocks:
            x = single_block(x, vec, positions)
        prediction: Tensor = self.final_layer(x[:, txt.shape[1] :], vec)
        return prediction

    @property
    def blocks(self) -> list[nn.Module]:
        """Return all blocks in the order of the passes."""
        return [*self.double_blocks, *self.single_blocks]

    def _positions(self, img_ids: Tensor, txt_ids: Tensor) -> Rotation:
        """Return the rotation of all tokens; it is computed again only for other tensors of ids."""
        last = self._last_positions
        if last is None or last[0] is not img_ids or last[1] is not txt_ids:
            by = rotation(torch.cat((txt_ids, img_ids)), self.axes_dim, self.theta)
            last = self._last_positions = img_ids, txt_ids, by
        return last[2]


# Embeddings of timestep, guidance and pooled text, whose sum is ``vec``.
#
# Axes: b batch, d hidden.


_TIME_FACTOR = 1000.0
_MAX_PERIOD = 10_000


def timestep_embedding(t: Float[Tensor, " b"], dim: int = TIMESTEP_DIM) -> Float[Tensor, "b dim"]:
    """Return [cos, sin] of 1000 t at ``dim`` / 2 geometrically spaced frequencies, in float32."""
    half = dim // 2
    exponents = torch.arange(half, dtype=torch.float32, device=t.device) / half
    angles = _TIME_FACTOR * t.float()[:, None] * torch.exp(-math.log(_MAX_PERIOD) * exponents)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class MLPEmbedder(nn.Module):
    """Linear, SiLU, linear: from a vector of any width to the hidden width."""

    def __init__(self, in_dim: int, hidden_size: int) -> None:
        super().__init__()
        self.in_layer = nn.Linear(in_dim, hidden_size)
        self.silu = nn.SiLU()
        self.out_layer = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Float[Tensor, "b i"]) -> Float[Tensor, "b d"]:
        embedding: Tensor = self.out_layer(self.silu(self.in_layer(x)))
        return embedding


# Packed latents, the model's image tokens: 2 x 2 patches, and their position ids.
#
# Axes: b batch, ch latent channels, h w latent image, n image tokens, l text tokens, c packed
# channels, a position axes.


def pack(latents: Float[Tensor, "b ch h w"]) -> Float[Tensor, "b n c"]:
    """Pack each 2x2 patch of latents into one token, row by row."""
    return rearrange(latents, "b ch (h ph) (w pw) -> b (h w) (ch ph pw)", ph=2, pw=2)


def unpack(img: Float[Tensor, "b n c"], height: int, width: int) -> Float[Tensor, "b ch h w"]:
    """Return the latents, ``height`` x ``width``, that :func:`pack` packed into ``img``."""
    return rearrange(
        img, "b (h w) (ch ph pw) -> b ch (h ph) (w pw)", h=height // 2, w=width // 2, ph=2, pw=2
    )


def image_ids(height: int, width: int) -> Float[Tensor, "n a"]:
    """Return the positions (0, row, column) of each token of a latent ``height`` x ``width``."""
    ids = torch.zeros(height // 2, width // 2, NUM_AXES)
    ids[..., 1] = torch.arange(height // 2)[:, None]
    ids[..., 2] = torch.arange(width // 2)
    return rearrange(ids, "h w a -> (h w) a")


def text_ids(length: int) -> Float[Tensor, "l a"]:
    """Return the position ids of text tokens: all zero, so they are not rotated."""
    return torch.zeros(length, NUM_AXES)
