"""What every data set offers: samples of one shape, read at random into a batch's arrays.

Axes: n samples, l text tokens, d text width, v pooled width, ch h w latent image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from fluxtrain.draws import Array


@dataclass(frozen=True)
class SampleShape:
    """The shapes and types of one sample."""

    txt: tuple[int, int]  # tokens, width
    vec: int
    latent: tuple[int, int, int]  # ch h w
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Rows:
    """Room for the samples of one batch, in the type they are stored in."""

    txt: Float[Tensor, "n l d"]
    vec: Float[Tensor, "n v"]
    mean: Float[Tensor, "n ch h w"]
    logvar: Float[Tensor, "n ch h w"]

    @staticmethod
    def empty(count: int, shape: SampleShape) -> Rows:
        """Return room for ``count`` samples, its contents undefined."""
        return Rows(
            torch.empty(count, *shape.txt, dtype=shape.dtype),
            torch.empty(count, shape.vec, dtype=shape.dtype),
            torch.empty(count, *shape.latent, dtype=shape.dtype),
            torch.empty(count, *shape.latent, dtype=shape.dtype),
        )

    def first(self, count: int) -> Rows:
        """Return the room of the first ``count`` samples: the same memory."""
        return Rows(self.txt[:count], self.vec[:count], self.mean[:count], self.logvar[:count])

    def finite(self, no_text: Array) -> list[bool]:
        """Return which samples' latents and pooled text are finite; a checksum guards the long text.

        Where ``no_text`` is true the text was not read and is not looked at.
        """
        # A sum is finite only where all its terms are, short of overflow, which is no encoding either.
        latents = self.mean.flatten(1).sum(1, dtype=torch.float32)
        latents += self.logvar.flatten(1).sum(1, dtype=torch.float32)
        vec = self.vec.sum(1, dtype=torch.float32)
        text = torch.isfinite(vec) | torch.from_numpy(no_text)
        ok: list[bool] = (torch.isfinite(latents) & text).tolist()
        return ok


class Dataset(Protocol):
    """Samples by index; safe to use in several processes after it was opened in one."""

    shape: SampleShape
    attribution: str
    """Whom the pictures are by, in words that a licence asks for; empty where there is nobody to name."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def read(self, indices: Array, rows: Rows, skip_text: Array) -> list[str | None]:
        """Fill ``rows`` with the samples at ``indices``; say per sample what is wrong with it, or None.

        Where ``skip_text`` is true the text encodings are left alone: the prompt is dropped.
        """
        ...

    def timesteps(self, indices: Array) -> Array:
        """Return the stored evaluation timesteps (0 ... 7), by index where none are stored."""
        ...

    def caption(self, index: int) -> str:
        """Return the prompt of sample ``index``."""
        ...

    def name(self, index: int) -> str:
        """Return what a person needs to find sample ``index``."""
        ...

    def empty_text(self) -> tuple[Float[Tensor, "l d"], Float[Tensor, " v"]] | None:
        """Return the empty prompt's encodings where the data set knows them."""
        ...
