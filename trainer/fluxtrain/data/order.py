"""Which sample stands where: a pure function of seed, global batch and position.

The samples of all epochs stand in one row; global batch k takes the next ``global_batch_size`` of it,
so every sample is used exactly once per epoch, by whatever ranks, and any batch can be the first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fluxtrain import draws
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.draws import Array


@dataclass
class Order:
    """The row of samples of a run."""

    seed: int
    num_samples: int
    global_batch_size: int
    _epochs: dict[int, Array] = field(default_factory=dict, repr=False)

    def indices(self, batch: int, positions: Array) -> Array:
        """Return the data set's indices at ``positions`` of global batch ``batch``, both from 0.

        A position past the batch's end has no sample: FILLER.
        """
        indices = np.full(len(positions), FILLER, dtype=np.int64)
        inside = positions < self.global_batch_size
        indices[inside] = self._samples(batch * self.global_batch_size + positions[inside])
        return indices

    def _samples(self, ordinals: Array) -> Array:
        """Return the indices at the places ``ordinals`` of the row."""
        epochs, places = np.divmod(ordinals, self.num_samples)
        indices = np.empty(len(ordinals), dtype=np.int64)
        for epoch in np.unique(epochs):
            inside = epochs == epoch
            indices[inside] = self._permutation(int(epoch))[places[inside]]
        return indices

    def _permutation(self, epoch: int) -> Array:
        if epoch not in self._epochs:
            for old in [known for known in self._epochs if known < epoch - 1]:
                del self._epochs[
                    old
                ]  # a batch touches two neighbouring epochs at most, or a tiny set
            self._epochs[epoch] = draws.epoch_order(self.seed, epoch, self.num_samples)
        return self._epochs[epoch]


FILLER = -1
"""Stands for a sample where there is none: it is not read, and weighs nothing."""


@dataclass(frozen=True)
class BatchShares:
    """How each global batch is divided: all ranks have equally many micro batches of equal size.

    Positions past the end of the global batch are fillers.
    """

    global_batch_size: int
    micro_batch_size: int
    num_ranks: int

    @staticmethod
    def of(config: RunConfig, num_ranks: int) -> BatchShares:
        """Return the shares of ``num_ranks``, in micro batches as large as the config allows.

        The micro batch is the largest divisor of a rank's share of the global batch. Shares that are not
        equal are filled up: then as few micro batches as possible, as small as holds the largest share.
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

    @property
    def padding(self) -> int:
        """Return the fillers in one optimizer step, over all ranks."""
        computed = self.num_ranks * self.micro_batch_size * self.accumulation_steps
        return computed - self.global_batch_size

    def positions(self, rank: int, micro_step: int) -> Array:
        """Return the positions of ``rank``'s micro batch ``micro_step``, from 0; fillers come last."""
        start = (micro_step * self.num_ranks + rank) * self.micro_batch_size
        return np.arange(start, start + self.micro_batch_size)
