"""The order of samples: a pure function of seed, global batch and position.

The permutations of all epochs are concatenated; global batch k takes the k-th ``global_batch_size``
samples. A sequential order has the same permutation in all epochs, the identity. Every sample is used
exactly once per epoch, for any number of ranks and from any first batch.

Of samples of several sizes each global batch has one size: in each epoch the permuted samples are
gathered by size into global batches, and these are permuted. What is left of a size is a batch with
fewer samples, one per size and epoch: its other positions are padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.data import PIXELS_PER_LATENT, BucketsConfig, DataConfig, Size
from fluxtrain.runtime import draws
from fluxtrain.runtime.draws import Array

PADDING = -1
"""The index of a padding sample: nothing is read for it, and its weight is 0."""


@dataclass
class Order:
    """The sequence of samples of a run."""

    seed: int
    num_samples: int
    global_batch_size: int
    is_sequential: bool = False
    _permutations: dict[int, Array] = field(default_factory=dict, repr=False)

    def indices(self, batch: int, positions: Array) -> Array:
        """Return the data set's indices at ``positions`` of global batch ``batch``, both from 0.

        Positions past the end of the batch are PADDING.
        """
        indices = np.full(len(positions), PADDING, dtype=np.int64)
        inside = positions < self.global_batch_size
        indices[inside] = self._samples(batch * self.global_batch_size + positions[inside])
        return indices

    def count(self, batch: int) -> int:
        """Return the samples of global batch ``batch``."""
        return self.global_batch_size

    def latent_size(self, batch: int) -> None:
        """Return None: the latents of all batches have the run's size."""

    def samples(self, batches: int) -> int:
        """Return the samples of the first ``batches`` global batches."""
        return batches * self.global_batch_size

    def batches(self, epochs: int) -> int:
        """Return the global batches with which ``epochs`` end; the last one may go beyond."""
        return math.ceil(epochs * self.num_samples / self.global_batch_size)

    def epochs(self, batches: int) -> int:
        """Return the number, from 1, of the epoch in which the last of ``batches`` global batches begins."""
        return max(0, batches - 1) * self.global_batch_size // self.num_samples + 1

    def _samples(self, ordinals: Array) -> Array:
        """Return the indices at ``ordinals`` of the concatenated permutations."""
        epochs, places = np.divmod(ordinals, self.num_samples)
        if self.is_sequential:
            return places
        indices = np.empty(len(ordinals), dtype=np.int64)
        for epoch in np.unique(epochs):
            inside = epochs == epoch
            indices[inside] = self._permutation(int(epoch))[places[inside]]
        return indices

    def _permutation(self, epoch: int) -> Array:
        if epoch not in self._permutations:
            # A batch spans two neighbouring epochs, more only if the data set is tiny.
            self._permutations = {e: p for e, p in self._permutations.items() if e >= epoch - 1}
            self._permutations[epoch] = draws.epoch_order(self.seed, epoch, self.num_samples)
        return self._permutations[epoch]


@dataclass(frozen=True)
class BatchShares:
    """The split of each global batch into equally many micro batches of equal size per rank.

    Positions past the end of the global batch are padding.
    """

    global_batch_size: int
    micro_batch_size: int
    num_ranks: int

    @staticmethod
    def of(config: RunConfig, num_ranks: int) -> BatchShares:
        """Return the shares of ``num_ranks`` ranks.

        The micro batch is the largest divisor of a rank's share up to ``parallel.micro_batch_size``. If the
        global batch does not divide by the ranks: as few micro batches as possible, and the smallest that do.
        """
        batch = config.schedule.global_batch_size
        share = -(-batch // num_ranks)
        largest = min(config.parallel.most_samples, share)
        if batch % num_ranks:
            size = -(-share // -(-share // largest))
        else:
            size = next(size for size in range(largest, 0, -1) if share % size == 0)
        return BatchShares(batch, size, num_ranks)

    @property
    def accumulation_steps(self) -> int:
        """Return the micro batches of each rank in one optimizer step."""
        return -(-self.global_batch_size // (self.micro_batch_size * self.num_ranks))

    def of_batch(self, count: int) -> BatchShares:
        """Return the shares of a batch of ``count`` samples: fewer than usual if it has fewer."""
        if count == self.global_batch_size:
            return self
        share = -(-count // self.num_ranks)
        size = -(-share // -(-share // self.micro_batch_size))
        return BatchShares(count, size, self.num_ranks)

    @property
    def padding(self) -> int:
        """Return the padding samples in one optimizer step, over all ranks."""
        computed = self.num_ranks * self.micro_batch_size * self.accumulation_steps
        return computed - self.global_batch_size

    def positions(self, rank: int, micro_step: int) -> Array:
        """Return the positions of ``rank``'s micro batch ``micro_step``, from 0; padding comes last."""
        start = (micro_step * self.num_ranks + rank) * self.micro_batch_size
        return np.arange(start, start + self.micro_batch_size)


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

    def __post_init__(self) -> None:
        """Find the different sizes, and by size the bounds of each batch."""
        self.latent_sizes, numbers = np.unique(self.sizes, axis=0, return_inverse=True)
        """Sorted, "b 2"."""
        self._of_samples = numbers.reshape(-1)
        ends = np.cumsum(np.bincount(self._of_samples))
        parts = [
            np.arange(start, end, self.global_batch_size)
            for start, end in pairwise([0, *ends.tolist()])
        ]
        self._buckets = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        self._starts = np.concatenate(parts)
        self._ends = np.minimum(self._starts + self.global_batch_size, ends[self._buckets])

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
            if self.is_sequential:  # a batch has its place where its last sample has
                by_size = np.argsort(self._of_samples, kind="stable")
                samples, batches = by_size, np.argsort(by_size[self._ends - 1])
            else:
                order = draws.epoch_order(self.seed, epoch, len(self.sizes))
                samples = order[np.argsort(self._of_samples[order], kind="stable")]
                batches = draws.batch_order(self.seed, epoch, self.batches_per_epoch)
            counts = (self._ends - self._starts)[batches]
            self._epochs[epoch] = _Epoch(samples, batches, np.cumsum([0, *counts]))
        return self._epochs[epoch]


@dataclass(frozen=True)
class Placement:
    """How an image is brought to the size of its bucket: it is resized, cropped, and may be mirrored."""

    size: Size
    """Width and height of the bucket, in pixels."""
    resized: Size
    """Width and height of the whole image before the crop; neither is below that of the bucket."""
    corner: tuple[int, int] | None = None
    """Left and top of the crop in the resized image; None: its middle is kept."""
    is_flipped: bool = False
    """Whether left and right are exchanged after the crop."""

    @property
    def box(self) -> tuple[int, int, int, int]:
        """Return left, top, right and bottom of the crop in the resized image."""
        left, top = self.corner or (
            (whole - kept) // 2 for whole, kept in zip(self.resized, self.size, strict=True)
        )
        return left, top, left + self.size[0], top + self.size[1]

    @property
    def latent_size(self) -> Size:
        """Return height and width of the latents, which have eight pixels each way."""
        width, height = self.size
        return height // PIXELS_PER_LATENT, width // PIXELS_PER_LATENT


@dataclass(frozen=True)
class Buckets:
    """The buckets of one or several resolutions."""

    config: BucketsConfig
    resolutions: tuple[int, ...]
    """Square roots of the number of pixels."""

    @staticmethod
    def of(data: DataConfig) -> Buckets:
        assert data.buckets is not None
        return Buckets(data.buckets, data.resolutions)

    def placements(self, width: int, height: int) -> tuple[Placement, ...]:
        """Return how an image of ``width`` x ``height`` pixels is brought to each resolution.

        Equal ones are returned once. Raises ValueError if the image is too small for any.
        """
        found = [self._placement(width, height, resolution) for resolution in self.resolutions]
        return tuple(dict.fromkeys(found))

    def _placement(self, width: int, height: int, resolution: int) -> Placement:
        if self.config.upscale:
            return _cover(width, height, self._nearest(width, height, resolution))
        return self._shrunk(width, height, resolution)

    def _nearest(self, width: int, height: int, resolution: int) -> Size:
        """Return the bucket with the nearest aspect ratio, the image's own size if that is one."""
        sizes = self._sizes[resolution]
        if (width, height) in sizes:
            return width, height
        return min(sizes, key=lambda size: abs(size[0] / size[1] - width / height))

    @cached_property
    def _sizes(self) -> dict[int, Sequence[Size]]:
        return {resolution: self.config.sizes(resolution) for resolution in self.resolutions}

    def _shrunk(self, width: int, height: int, resolution: int) -> Placement:
        """Return a placement that does not enlarge: its bucket is the resized image, rounded down."""
        step, (_, longest) = self.config.step, self.config.sides(resolution)
        resized = width, height
        if width * height > resolution**2:
            resized = self._fitting(width / height, resolution)
        kept = [min(side // step * step, longest) for side in resized]
        if not all(kept):
            raise ValueError(
                f"{width} x {height} pixels: a side is shorter than {step} and images are not enlarged"
            )
        return Placement((kept[0], kept[1]), resized)

    def _fitting(self, aspect: float, resolution: int) -> Size:
        """Return a size of the aspect ratio, of about ``resolution`` squared pixels.

        Of the two whose width, or height, is rounded to steps, that whose bucket has the nearer aspect ratio.
        """
        width, height = resolution * math.sqrt(aspect), resolution / math.sqrt(aspect)
        wide, high = self._rounded(width), self._rounded(height)
        by_width = wide, _round(wide / aspect)
        by_height = _round(high * aspect), high
        return min(by_height, by_width, key=lambda size: self._error(size, aspect))

    def _error(self, size: Size, aspect: float) -> float:
        width, height = (self._rounded(side) for side in size)
        return abs(width / height - aspect) if height else math.inf

    def _rounded(self, side: float) -> int:
        return _round(side) // self.config.step * self.config.step


def _cover(width: int, height: int, size: Size) -> Placement:
    """Return the placement that fills ``size``: one side fits, the other is as long or longer."""
    scale = max(size[0] / width, size[1] / height)
    return Placement(
        size, (max(size[0], _round(width * scale)), max(size[1], _round(height * scale)))
    )


def _round(side: float) -> int:
    return int(side + 0.5)
