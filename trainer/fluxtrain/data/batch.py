"""One micro batch: encodings, latents' distribution, and the draws that belong to its samples.

Axes: b batch, l text tokens, d text width, v pooled width, ch h w latent image.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Samples in the order of their positions; dropped prompts hold the empty encodings already."""

    mean: Float[Tensor, "b ch h w"]
    logvar: Float[Tensor, "b ch h w"]
    txt: Float[Tensor, "b l d"]
    vec: Float[Tensor, "b v"]
    latent_noise: Float[Tensor, "b ch h w"]
    noise: Float[Tensor, "b ch h w"]
    timesteps: Float[Tensor, b]
    weights: Float[Tensor, b]  # 1; 0 where the sample was unreadable or only fills the batch up
    dropped: Bool[Tensor, b]
    indices: Int[Tensor, b]  # which sample of the data set; -1 where it only fills up
    faults: tuple[str, ...] = ()  # one sentence per unreadable sample, naming it

    def __len__(self) -> int:
        """Return the number of samples, fillers included."""
        return len(self.weights)

    def _tensors(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def pin_memory(self) -> Batch:
        """Return this batch in page-locked memory; torch's DataLoader calls it."""
        return Batch(
            **{name: tensor.pin_memory() for name, tensor in self._tensors().items()},
            faults=self.faults,
        )

    def to(self, device: torch.device) -> Batch:
        """Return this batch on ``device``, copied without waiting where it is pinned."""
        return Batch(
            **{name: t.to(device, non_blocking=True) for name, t in self._tensors().items()},
            faults=self.faults,
        )
