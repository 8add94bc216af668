"""One micro batch: encodings or images, and the random draws of its samples.

Axes: b batch, l text tokens, d text width, v pooled width, ch h w latent image, H W image,
i token ids of CLIP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from fluxtrain.draws import Array, Draw

_HOST_FIELDS = ("dropped", "indices")
"""Tensors that only the host reads."""


@dataclass(frozen=True, kw_only=True)
class DrawnBatch:
    """The indices, weights and random draws of a batch's samples."""

    latent_noise: Float[Tensor, "b ch h w"]
    noise: Float[Tensor, "b ch h w"]
    timesteps: Float[Tensor, b]
    weights: Float[Tensor, b]  # 1; 0 for an unreadable sample and for padding
    keys: Int[Tensor, b]  # below 2**32: what adapters drop
    dropped: Bool[Tensor, b]
    indices: Int[Tensor, b]  # into the data set; -1 for padding
    faults: tuple[str, ...] = ()  # one message per unreadable sample, with its name

    def __len__(self) -> int:
        """Return the number of samples, padding included."""
        return len(self.weights)

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields that are tensors, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def pin_memory(self) -> Self:
        """Return this batch in page-locked memory; torch's DataLoader calls it."""
        pinned: dict[str, Any] = {name: t.pin_memory() for name, t in self.tensors().items()}
        return replace(self, **pinned)

    def device_tensors(self) -> dict[str, Tensor]:
        """Return the fields that are on the device after `to`, by name: what the model and the loss need."""
        return {name: t for name, t in self.tensors().items() if name not in _HOST_FIELDS}

    def to(self, device: torch.device) -> Self:
        """Return this batch on ``device``, copied asynchronously if it is pinned; `_HOST_FIELDS` stay."""
        moved: dict[str, Any] = {
            name: t.to(device, non_blocking=True) for name, t in self.device_tensors().items()
        }
        return replace(self, **moved)


def drawn_fields(indices: Array, drawn: Sequence[Draw]) -> dict[str, Any]:
    """Return the fields of a batch that are given by its samples' indices and draws."""
    return {
        "latent_noise": torch.from_numpy(np.stack([draw.latent_noise for draw in drawn])),
        "noise": torch.from_numpy(np.stack([draw.noise for draw in drawn])),
        "timesteps": torch.tensor([draw.timestep for draw in drawn], dtype=torch.float32),
        "keys": torch.tensor([draw.key for draw in drawn], dtype=torch.int64),
        "dropped": torch.tensor([draw.dropped for draw in drawn]),
        "indices": torch.from_numpy(indices),
    }


@dataclass(frozen=True, kw_only=True)
class Batch(DrawnBatch):
    """Encoded samples in the order of their positions; a dropped prompt has the empty prompt's encodings."""

    mean: Float[Tensor, "b ch h w"]
    logvar: Float[Tensor, "b ch h w"]
    txt: Float[Tensor, "b l d"]
    vec: Float[Tensor, "b v"] | Int[Tensor, "b i"]  # token ids if adapters of CLIP are trained
    mask: Float[Tensor, "b h w"] | None = None  # weights of latents in the loss; None: all are 1


@dataclass(frozen=True, kw_only=True)
class ImageBatch(DrawnBatch):
    """Images and captions in the order of their positions; a dropped prompt is ""."""

    images: UInt8[Tensor, "b 3 H W"]
    captions: tuple[str, ...]
