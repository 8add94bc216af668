"""The two kinds of block and the last layer.

Axes: b batch, n image tokens, l text tokens, s = l + n, d hidden, h heads, k head width.
"""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the usual name)
from torch.nn.attention import SDPBackend, sdpa_kernel

Vec = Float[Tensor, "b d"]
Triple = tuple[Tensor, Tensor, Tensor]  # shift, scale, gate; each b 1 d
EPSILON = 1e-6
"""Added to the variance by norms without weights."""


class Modulation(nn.Module):
    """Computes shift, scale and gate from ``vec``, once or twice (adaLN-Zero)."""

    def __init__(self, hidden_size: int, triples: int) -> None:
        """Compute ``triples`` times (shift, scale, gate) of width ``hidden_size``."""
        super().__init__()
        self.triples = triples
        self.lin = nn.Linear(hidden_size, 3 * triples * hidden_size)

    def forward(self, vec: Vec) -> tuple[Triple, ...]:
        chunks = self.lin(F.silu(vec))[:, None].chunk(3 * self.triples, dim=-1)
        return tuple(chunks[3 * i : 3 * i + 3] for i in range(self.triples))


def modulate(x: Float[Tensor, "b s d"], shift: Tensor, scale: Tensor) -> Float[Tensor, "b s d"]:
    """Return (1 + scale) norm(x) + shift; the norm has no weights."""
    return torch.addcmul(shift, F.layer_norm(x, x.shape[-1:], eps=EPSILON), 1 + scale)


def split_heads(qkv: Float[Tensor, "b s _"], num_heads: int) -> tuple[Heads, Heads, Heads]:
    """Return queries, keys and values of a fused projection: [q | k | v], heads outermost."""
    q, k, v = rearrange(qkv, "b s (three h k) -> three b h s k", three=3, h=num_heads)
    return q, k, v


class SelfAttention(nn.Module):
    """The attention weights of one stream; the block computes attention over both streams."""

    def __init__(self, hidden_size: int, num_heads: int, eps: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.norm = QKNorm(hidden_size // num_heads, eps)
        self.proj = nn.Linear(hidden_size, hidden_size)

    def heads(self, x: Float[Tensor, "b s d"]) -> tuple[Heads, Heads, Heads]:
        """Return normalised queries and keys, and values."""
        q, k, v = split_heads(self.qkv(x), self.num_heads)
        q, k = self.norm(q, k)
        return q, k, v


def mlp(hidden_size: int, mlp_hidden: int) -> nn.Sequential:
    """Return linear, GELU (tanh), linear."""
    return nn.Sequential(
        nn.Linear(hidden_size, mlp_hidden),
        nn.GELU(approximate="tanh"),
        nn.Linear(mlp_hidden, hidden_size),
    )


class DoubleStreamBlock(nn.Module):
    """Image and text streams with separate weights and joint attention."""

    def __init__(self, hidden_size: int, num_heads: int, mlp_hidden: int, eps: float) -> None:
        super().__init__()
        self.img_mod = Modulation(hidden_size, triples=2)
        self.img_attn = SelfAttention(hidden_size, num_heads, eps)
        self.img_mlp = mlp(hidden_size, mlp_hidden)
        self.txt_mod = Modulation(hidden_size, triples=2)
        self.txt_attn = SelfAttention(hidden_size, num_heads, eps)
        self.txt_mlp = mlp(hidden_size, mlp_hidden)

    def forward(
        self,
        img: Float[Tensor, "b n d"],
        txt: Float[Tensor, "b l d"],
        vec: Vec,
        positions: Rotation,
    ) -> tuple[Float[Tensor, "b n d"], Float[Tensor, "b l d"]]:
        (img_shift, img_scale, img_gate), img_mlp_mod = self.img_mod(vec)
        (txt_shift, txt_scale, txt_gate), txt_mlp_mod = self.txt_mod(vec)

        txt_qkv = self.txt_attn.heads(modulate(txt, txt_shift, txt_scale))
        img_qkv = self.img_attn.heads(modulate(img, img_shift, img_scale))
        q, k, v = (torch.cat(pair, dim=2) for pair in zip(txt_qkv, img_qkv, strict=True))
        attended = attention(q, k, v, positions)
        txt_attended, img_attended = attended[:, : txt.shape[1]], attended[:, txt.shape[1] :]

        img = torch.addcmul(img, img_gate, self.img_attn.proj(img_attended))
        txt = torch.addcmul(txt, txt_gate, self.txt_attn.proj(txt_attended))
        return _add_mlp(img, self.img_mlp, img_mlp_mod), _add_mlp(txt, self.txt_mlp, txt_mlp_mod)


def _add_mlp(x: Tensor, layers: nn.Module, mod: Triple) -> Tensor:
    shift, scale, gate = mod
    return torch.addcmul(x, gate, layers(modulate(x, shift, scale)))


class SingleStreamBlock(nn.Module):
    """One stream with attention and MLP in parallel, their projections fused."""

    def __init__(self, hidden_size: int, num_heads: int, mlp_hidden: int, eps: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.widths = [3 * hidden_size, mlp_hidden]
        self.linear1 = nn.Linear(hidden_size, sum(self.widths))
        self.linear2 = nn.Linear(hidden_size + mlp_hidden, hidden_size)
        self.norm = QKNorm(hidden_size // num_heads, eps)
        self.modulation = Modulation(hidden_size, triples=1)

    def forward(
        self, x: Float[Tensor, "b s d"], vec: Vec, positions: Rotation
    ) -> Float[Tensor, "b s d"]:
        ((shift, scale, gate),) = self.modulation(vec)
        qkv, hidden = self.linear1(modulate(x, shift, scale)).split(self.widths, dim=-1)
        q, k, v = split_heads(qkv, self.num_heads)
        q, k = self.norm(q, k)
        attended = attention(q, k, v, positions)
        concatenated = torch.cat((attended, F.gelu(hidden, approximate="tanh")), dim=-1)
        return torch.addcmul(x, gate, self.linear2(concatenated))


class LastLayer(nn.Module):
    """Modulates and projects to packed latent channels."""

    def __init__(self, hidden_size: int, out_channels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, out_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 2 * hidden_size))

    def forward(self, x: Float[Tensor, "b n d"], vec: Vec) -> Float[Tensor, "b n c"]:
        shift, scale = self.adaLN_modulation(vec)[:, None].chunk(2, dim=-1)
        prediction: Tensor = self.linear(modulate(x, shift, scale))
        return prediction


# Attention with rotary positions and normalised queries and keys.
#
# Axes: b batch, s tokens, h heads, k head width, p = k / 2 rotation angles, n position axes (3).


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
    return attend(rotate(q, positions), rotate(k, positions), v)


def attend(q: Heads, k: Heads, v: Heads) -> Float[Tensor, "b s d"]:
    """Return bidirectional attention, its heads concatenated."""
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
        super().__init__()
        self.query_norm = RMSNorm(dim, eps)
        self.key_norm = RMSNorm(dim, eps)

    def forward(self, q: Heads, k: Heads) -> tuple[Heads, Heads]:
        return self.query_norm(q), self.key_norm(k)


any_attention = sdpa_kernel(
    [
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
)
"""Lets torch choose the attention of frozen encoders: T5's has a bias, the autoencoder's 512 channels a head.

What ``spec.run.parallel.attention`` names may compute neither.
"""
