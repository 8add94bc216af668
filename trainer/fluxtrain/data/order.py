"""The order of samples: a pure function of seed, global batch and position.

The permutations of all epochs are concatenated; global batch k takes the k-th ``global_batch_size`` samples.
A sequential order has the same permutation in all epochs, the identity.
Every sample is used exactly once per epoch, for any number of ranks and from any first batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from fluxtrain import draws
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.draws import Array

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
        largest = min(config.parallel.micro_batch_size, share)
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
