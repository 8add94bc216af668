"""A data set without files: each class has one random latent and one random text encoding.

With buckets the classes have one size after the other, or the samples the sizes that are given, in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fluxtrain import draws
from fluxtrain.contract.run.buckets import Size
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.dataset import Encodings, SampleShape
from fluxtrain.draws import NUM_TIMESTEPS, Array

_LOGVAR = -20.0  # a standard deviation of 5e-5: the latent is its mean


class SyntheticDataset:
    """Sample i is of class i modulo the number of classes; classes are drawn from the seed."""

    def __init__(
        self, config: RunConfig, num_samples: int, in_turn: Sequence[Size] | None = None
    ) -> None:
        """Draw the classes of ``config``; ``num_samples`` is the length of the set."""
        self.attribution = ""
        data, model = config.data, config.model
        self.num_samples, self.num_classes = num_samples, data.synthetic.classes
        self._of_classes = in_turn is None
        self._sizes = np.array(data.latent_sizes if in_turn is None else in_turn)
        self.shape = SampleShape(
            (data.text_length, model.context_in_dim), model.vec_in_dim, config.latent_shape
        )
        self._txt = _normal(config.drawn_seed, 0, (self.num_classes, *self.shape.txt))
        self._vec = _normal(config.drawn_seed, 1, (self.num_classes, self.shape.vec))
        channels, (height, width) = config.latent_channels, self._sizes.max(axis=0).tolist()
        self._mean = _normal(config.drawn_seed, 2, (self.num_classes, channels, height, width))

    @property
    def latent_sizes(self) -> Array:
        """Return height and width of the latents of every sample, "n 2"."""
        numbers = np.arange(len(self))
        if self._of_classes:
            numbers = numbers % self.num_classes
        return self._sizes[numbers % len(self._sizes)]

    @property
    def files(self) -> tuple[Path, ...]:
        """Return no files."""
        return ()

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.num_samples

    def read(self, indices: Array, out: Encodings, skip_text: Array) -> list[str | None]:
        """Fill ``out`` with the samples at ``indices``; return no faults."""
        classes = torch.from_numpy(indices % self.num_classes)
        torch.index_select(self._txt, 0, classes, out=out.txt)
        torch.index_select(self._vec, 0, classes, out=out.vec)
        height, width = out.mean.shape[2:]
        torch.index_select(self._mean[:, :, :height, :width], 0, classes, out=out.mean)
        out.logvar.fill_(_LOGVAR)
        return [None] * len(indices)

    def timesteps(self, indices: Array) -> Array:
        """Return the index modulo the number of timesteps."""
        return indices % NUM_TIMESTEPS

    def caption(self, index: int) -> str:
        """Return the name of its class."""
        return f"class {index % self.num_classes}"

    def name(self, index: int) -> str:
        """Return the number of the sample."""
        return f"synthetic sample {index}"

    def empty_text(self) -> tuple[Tensor, Tensor]:
        """Return zeros."""
        return torch.zeros(self.shape.txt), torch.zeros(self.shape.vec)


def _normal(seed: int, part: int, shape: tuple[int, ...]) -> Tensor:
    rng = draws.generator(seed, draws.SYNTHETIC, part)
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))
