"""Embeddings of timestep, guidance and pooled text, whose sum is ``vec``.

Axes: b batch, d hidden.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fluxtrain.contract.run.model import TIMESTEP_DIM

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
        """Map ``in_dim`` to ``hidden_size``."""
        super().__init__()
        self.in_layer = nn.Linear(in_dim, hidden_size)
        self.silu = nn.SiLU()
        self.out_layer = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Float[Tensor, "b i"]) -> Float[Tensor, "b d"]:
        """Return the embedding of ``x``."""
        embedding: Tensor = self.out_layer(self.silu(self.in_layer(x)))
        return embedding
