"""The order of samples: each once per epoch, for any number of ranks and from any first batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxtrain.data.order import PADDING, BatchShares, Order
from fluxtrain.runtime import draws

SEED = 11


@dataclass(frozen=True)
class Layout:
    """A run's split of its batches over ranks and micro batches."""

    world_size: int
    micro_batch_size: int
    accumulation: int
    padding: int  # at most the size of the last micro batches

    @property
    def global_batch_size(self) -> int:
        whole = self.world_size * self.micro_batch_size * self.accumulation
        return whole - self.padding % (self.world_size * self.micro_batch_size)

    @property
    def shares(self) -> BatchShares:
        return BatchShares(self.global_batch_size, self.micro_batch_size, self.world_size)

    def batch(self, order: Order, number: int) -> list[int]:
        """Return the indices of global batch ``number``, in the order of the positions."""
        return [
            int(index)
            for micro_step in range(self.accumulation)
            for rank in range(self.world_size)
            for index in order.indices(number, self.shares.positions(rank, micro_step))
            if index != PADDING
        ]


LAYOUTS = st.builds(
    Layout,
    world_size=st.integers(1, 9),
    micro_batch_size=st.integers(1, 5),
    accumulation=st.integers(1, 4),
    padding=st.integers(0, 50),
)


@settings(max_examples=150, deadline=None)
@given(layout=LAYOUTS, num_samples=st.integers(1, 97), epochs=st.integers(1, 4))
def test_each_epoch_uses_every_sample_once_for_any_number_of_ranks(
    layout: Layout, num_samples: int, epochs: int
) -> None:
    order = Order(SEED, num_samples, layout.global_batch_size)
    batches = -(-epochs * num_samples // layout.global_batch_size)  # most straddle an epoch's end
    ordered = [index for number in range(batches) for index in layout.batch(order, number)]
    for epoch in range(epochs):
        used = ordered[epoch * num_samples : (epoch + 1) * num_samples]
        assert sorted(used) == list(range(num_samples))


@settings(max_examples=100, deadline=None)
@given(layout=LAYOUTS)
def test_the_ranks_get_every_position_once(layout: Layout) -> None:
    positions = [
        int(position)
        for micro_step in range(layout.accumulation)
        for rank in range(layout.world_size)
        for position in layout.shares.positions(rank, micro_step)
    ]
    assert layout.shares.accumulation_steps == layout.accumulation
    assert positions[: layout.global_batch_size] == list(range(layout.global_batch_size))
    padding = np.array(positions[layout.global_batch_size :], dtype=np.int64)
    indices = Order(SEED, 97, layout.global_batch_size).indices(0, padding)
    assert list(indices) == [PADDING] * len(padding)


@settings(max_examples=50, deadline=None)
@given(
    num_samples=st.integers(1, 50),
    size=st.integers(1, 60),
    first=st.integers(0, 30),
)
def test_a_batch_is_the_same_after_others_and_as_the_first(
    num_samples: int, size: int, first: int
) -> None:
    positions = np.arange(size)
    advanced, fresh = (Order(SEED, num_samples, size) for _ in range(2))
    reached = [advanced.indices(number, positions) for number in range(first + 1)][-1]
    np.testing.assert_array_equal(reached, fresh.indices(first, positions))


def test_an_earlier_batch_has_the_same_samples_again() -> None:
    order, positions = Order(SEED, 10, 8), np.arange(8)
    before = order.indices(0, positions)
    order.indices(40, positions)
    np.testing.assert_array_equal(order.indices(0, positions), before)


def test_few_permutations_are_kept_in_memory() -> None:
    order, positions = Order(SEED, 10, 8), np.arange(8)
    for number in range(200):
        order.indices(number, positions)
    assert len(order._permutations) <= 2


def test_epochs_and_seeds_have_different_orders() -> None:
    order, positions = Order(SEED, 64, 64), np.arange(64)
    assert list(order.indices(0, positions)) != list(order.indices(1, positions))
    assert list(order.indices(0, positions)) != list(Order(12, 64, 64).indices(0, positions))


@pytest.mark.parametrize(("num_samples", "size"), [(10, 8), (8, 8), (3, 8), (1, 5), (97, 1)])
def test_a_sequential_order_is_that_of_the_data_set_in_every_epoch(
    num_samples: int, size: int
) -> None:
    orders = [Order(seed, num_samples, size, is_sequential=True) for seed in (SEED, 12)]
    for batch in (0, 1, 7, 1000):
        expected = [(batch * size + place) % num_samples for place in range(size)]
        for order in orders:
            assert list(order.indices(batch, np.arange(size))) == expected
    assert orders[0].indices(0, np.array([size, size + 3])).tolist() == [PADDING] * 2


@pytest.mark.parametrize("batch", [0, 2_148, 20_000_000])
def test_any_batch_of_a_million_samples_can_be_the_first(batch: int) -> None:
    num_samples, size = 1_100_000, 512
    indices = Order(SEED, num_samples, size).indices(batch, np.arange(size))
    epoch, place = divmod(batch * size, num_samples)
    first = draws.epoch_order(SEED, epoch, num_samples)[place]
    assert indices[0] == first
    assert len(np.unique(indices)) >= size // 2  # distinct within each epoch it touches
    assert indices.min() >= 0
    assert indices.max() < num_samples
