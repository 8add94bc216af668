"""Which sample stands where: a pure function of seed, global batch and position (design D3).

The samples of all epochs stand in one row; global batch k takes the next ``global_batch_size`` of it,
so every sample is used exactly once per epoch, by whatever ranks, and any batch can be the first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fluxtrain import draws
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


def accumulation_steps(global_batch_size: int, micro_batch_size: int, num_ranks: int) -> int:
    """Return the micro batches of each rank that hold a global batch; the last ones may not be full."""
    return -(-global_batch_size // (micro_batch_size * num_ranks))


@dataclass(frozen=True)
class Share:
    """The positions of each global batch that one rank works on, micro batch by micro batch.

    All ranks have equally many micro batches of equal size; positions past the end are fillers.
    """

    global_batch_size: int
    micro_batch_size: int
    rank: int
    world_size: int

    @property
    def accumulation(self) -> int:
        """Return the micro batches per global batch."""
        return accumulation_steps(self.global_batch_size, self.micro_batch_size, self.world_size)

    def positions(self, micro_step: int) -> Array:
        """Return the positions of this rank's micro batch ``micro_step``, from 0; fillers come last."""
        start = (micro_step * self.world_size + self.rank) * self.micro_batch_size
        return np.arange(start, start + self.micro_batch_size)
