"""Attention with rotary positions and normalised queries and keys.

Axes: b batch, s tokens, h heads, k head width, p = k / 2 rotation angles, n position axes (3).
"""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the usual name)

Heads = Float[Tensor, "b h s k"]
Rotation = tuple[Float[Tensor, "s p"], Float[Tensor, "s p"]]  # cosines and sines, float32


def rotation(ids: Float[Tensor, "s n"], axes_dim: tuple[int, ...], theta: int) -> Rotation:
    """Return cosines and sines of the RoPE angles at the positions ``ids``; each axis has its own channels.

    Frequencies and angles are computed in float64, as diffusers does, and returned in float32.
    """
    angles = []
    for axis, dim in enumerate(axes_dim):
        exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=ids.device) / dim
        angles.append(ids[:, axis, None].double() * theta**-exponents)
    angle = torch.cat(angles, dim=-1)
    return angle.cos().float(), angle.sin().float()


def rotate(x: Heads, by: Rotation) -> Heads:
    """Return ``x`` with channels (2j, 2j+1) of each head rotated together, in float32 arithmetic."""
    cos, sin = by
    even, odd = rearrange(x.float(), "b h s (p two) -> two b h s p", two=2)
    rotated = torch.stack((cos * even - sin * odd, sin * even + cos * odd), dim=-1)
    return rotated.flatten(-2).type_as(x)


def attention(q: Heads, k: Heads, v: Heads, positions: Rotation) -> Float[Tensor, "b s d"]:
    """Return bidirectional attention with rotated ``q`` and ``k``, its heads concatenated."""
    q, k = rotate(q, positions), rotate(k, positions)
    return rearrange(F.scaled_dot_product_attention(q, k, v), "b h s k -> b s (h k)")


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim, in float32; its weight is ``scale`` as in BFL's files."""

    def __init__(self, dim: int, eps: float) -> None:
        """Normalise ``dim`` channels; ``eps`` is added to their mean square."""
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` over its root mean square, times ``scale``, in the dtype of ``x``."""
        return F.rms_norm(x.float(), x.shape[-1:], self.scale.float(), eps=self.eps).type_as(x)


class QKNorm(nn.Module):
    """RMS norms of queries and keys, one weight vector for all heads."""

    def __init__(self, dim: int, eps: float) -> None:
        """Normalise heads of width ``dim``."""
        super().__init__()
        self.query_norm = RMSNorm(dim, eps)
        self.key_norm = RMSNorm(dim, eps)

    def forward(self, q: Heads, k: Heads) -> tuple[Heads, Heads]:
        """Return normalised queries and keys."""
        return self.query_norm(q), self.key_norm(k)
