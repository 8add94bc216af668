"""The order of samples of several sizes: each global batch has samples of one size.

In each epoch the samples are permuted as ever, then gathered by size into global batches, and these are
permuted. Every sample is used exactly once per epoch, for any number of ranks and from any first batch. What
is left of a size is a batch with fewer samples, one per size and epoch: its other positions are padding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from fluxtrain import draws
from fluxtrain.contract.run.buckets import Size
from fluxtrain.data.order import PADDING
from fluxtrain.draws import Array


@dataclass(frozen=True)
class _Epoch:
    """The samples of an epoch, those of a size together, and its batches in order."""

    samples: Array
    batches: Array
    """Numbers of batches, as they are in ``BucketOrder``."""
    before: Array
    """Samples in the batches before each, and in all."""


@dataclass
class BucketOrder:
    """The sequence of samples of a run, in global batches of one size."""

    seed: int
    sizes: Array
    """Height and width of each sample's latents, "n 2"."""
    global_batch_size: int
    is_sequential: bool = False
    _epochs: dict[int, _Epoch] = field(default_factory=dict, repr=False)

    @property
    def latent_sizes(self) -> Array:
        """Return the different sizes, "b 2", sorted."""
        return self._by_size[0]

    @property
    def batches_per_epoch(self) -> int:
        """Return the global batches that use every sample once."""
        return len(self._starts)

    def batches(self, epochs: int) -> int:
        """Return the global batches of ``epochs``."""
        return epochs * self.batches_per_epoch

    def epochs(self, batches: int) -> int:
        """Return the number, from 1, of the epoch of the last of ``batches`` global batches."""
        return max(0, batches - 1) // self.batches_per_epoch + 1

    def indices(self, batch: int, positions: Array) -> Array:
        """Return the data set's indices at ``positions`` of global batch ``batch``, both from 0.

        Positions past the last sample of the batch are PADDING.
        """
        number, epoch = self._number(batch)
        start, end = self._starts[number], self._ends[number]
        indices = np.full(len(positions), PADDING, dtype=np.int64)
        inside = positions < end - start
        indices[inside] = epoch.samples[start + positions[inside]]
        return indices

    def count(self, batch: int) -> int:
        """Return the samples of global batch ``batch``."""
        number, _ = self._number(batch)
        return int(self._ends[number] - self._starts[number])

    def latent_size(self, batch: int) -> Size:
        """Return height and width of the latents of global batch ``batch``."""
        number, _ = self._number(batch)
        height, width = self.latent_sizes[self._buckets[number]].tolist()
        return height, width

    def samples(self, batches: int) -> int:
        """Return the samples of the first ``batches`` global batches."""
        epoch, place = divmod(batches, self.batches_per_epoch)
        return epoch * len(self.sizes) + int(self._epoch(epoch).before[place])

    def _number(self, batch: int) -> tuple[int, _Epoch]:
        epoch, place = divmod(batch, self.batches_per_epoch)
        return int(self._epoch(epoch).batches[place]), self._epoch(epoch)

    def _epoch(self, epoch: int) -> _Epoch:
        if epoch not in self._epochs:
            self._epochs = {e: kept for e, kept in self._epochs.items() if e == epoch - 1}
            self._epochs[epoch] = self._make_epoch(epoch)
        return self._epochs[epoch]

    def _make_epoch(self, epoch: int) -> _Epoch:
        if self.is_sequential:  # a batch has its place where its last sample has
            by_size = np.argsort(self._of_samples, kind="stable")
            samples, batches = by_size, np.argsort(by_size[self._ends - 1])
        else:
            order = draws.epoch_order(self.seed, epoch, len(self.sizes))
            samples = order[np.argsort(self._of_samples[order], kind="stable")]
            batches = draws.batch_order(self.seed, epoch, self.batches_per_epoch)
        counts = (self._ends - self._starts)[batches]
        return _Epoch(samples, batches, np.cumsum([0, *counts]))

    @property
    def _of_samples(self) -> Array:
        """Return the number of each sample's size."""
        return self._by_size[1]

    @cached_property
    def _by_size(self) -> tuple[Array, Array]:
        different, numbers = np.unique(self.sizes, axis=0, return_inverse=True)
        return different, numbers.reshape(-1)

    @cached_property
    def _bounds(self) -> tuple[Array, Array, Array]:
        """Return the first sample of each batch and the one after its last, by size; and its size."""
        ends = np.cumsum(np.bincount(self._of_samples))
        starts = np.concatenate([[0], ends[:-1]])
        parts = [
            np.arange(*each, self.global_batch_size) for each in zip(starts, ends, strict=True)
        ]
        buckets = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        first = np.concatenate(parts)
        return first, np.minimum(first + self.global_batch_size, ends[buckets]), buckets

    @property
    def _starts(self) -> Array:
        return self._bounds[0]

    @property
    def _ends(self) -> Array:
        return self._bounds[1]

    @property
    def _buckets(self) -> Array:
        return self._bounds[2]
