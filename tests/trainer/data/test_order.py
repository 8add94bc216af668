"""The order of samples, also of several sizes: each once per epoch, for any number of ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxtrain.data.order import PADDING, BatchShares, BucketOrder, Order
from fluxtrain.runtime import draws
from fluxtrain.runtime.draws import Array

pytestmark = pytest.mark.slow

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


SIZES = np.array([[4, 4], [2, 6], [6, 2], [8, 2]])
SAMPLES = st.lists(st.integers(0, 3), min_size=1, max_size=60).map(lambda of: SIZES[np.array(of)])


def batches(order: BucketOrder, numbers: range) -> list[list[int]]:
    """Return the samples of global batches, in the order of their positions."""
    everything = np.arange(order.global_batch_size)
    return [order.indices(number, everything).tolist() for number in numbers]


def used(batch: list[int]) -> list[int]:
    return [index for index in batch if index != PADDING]


@settings(max_examples=150, deadline=None)
@given(sizes=SAMPLES, size=st.integers(1, 9), epochs=st.integers(1, 3))
def test_each_epoch_uses_every_sample_once_in_batches_of_one_size(
    sizes: Array, size: int, epochs: int
) -> None:
    order = BucketOrder(SEED, sizes, size)
    counts = Counter(map(tuple, sizes.tolist()))
    assert order.batches_per_epoch == sum(-(-count // size) for count in counts.values())
    total = 0
    for epoch in range(epochs):
        first = epoch * order.batches_per_epoch
        numbers = range(first, first + order.batches_per_epoch)
        found = batches(order, numbers)
        for number, batch in zip(numbers, found, strict=True):
            own = used(batch)
            assert batch == own + [PADDING] * (size - len(own))  # padding comes last
            assert {tuple(sizes[index]) for index in own} == {order.latent_size(number)}
            assert order.count(number) == len(own) > 0
            total += len(own)
            assert order.samples(number + 1) == total
        assert sorted(index for batch in found for index in used(batch)) == list(range(len(sizes)))
        short = Counter(order.latent_size(n) for n in numbers if order.count(n) < size)
        assert all(count == 1 for count in short.values())


@settings(max_examples=50, deadline=None)
@given(sizes=SAMPLES, size=st.integers(1, 9), first=st.integers(0, 40))
def test_a_batch_of_a_bucket_is_the_same_after_others_and_as_the_first(
    sizes: Array, size: int, first: int
) -> None:
    advanced, fresh = (BucketOrder(SEED, sizes, size) for _ in range(2))
    assert batches(advanced, range(first + 1))[-1] == batches(fresh, range(first, first + 1))[0]
    assert advanced.samples(first) == fresh.samples(first)
    assert len(advanced._epochs) <= 2


@settings(max_examples=100, deadline=None)
@given(
    count=st.integers(1, 40),
    missing=st.integers(0, 39),
    micro=st.integers(1, 7),
    num_ranks=st.integers(1, 5),
)
def test_ranks_divide_a_batch_with_fewer_samples(
    count: int, missing: int, micro: int, num_ranks: int
) -> None:
    share = -(-count // num_ranks)
    size = -(-share // -(-share // min(micro, share)))  # the smallest with as few micro batches
    whole = BatchShares(count, size, num_ranks)
    left = max(1, count - missing)
    shares = whole.of_batch(left)
    positions = [
        int(position)
        for step in range(shares.accumulation_steps)
        for rank in range(num_ranks)
        for position in shares.positions(rank, step)
    ]
    assert sorted(positions)[:left] == list(range(left))
    assert shares.accumulation_steps == -(-left // (whole.micro_batch_size * num_ranks))
    assert shares.padding < num_ranks * shares.accumulation_steps


def test_batches_and_epochs_are_shuffled() -> None:
    order = BucketOrder(SEED, np.repeat(SIZES, 32, axis=0), 4)
    numbers = range(order.batches_per_epoch)
    sizes = [order.latent_size(number) for number in numbers]
    changes = sum(a != b for a, b in pairwise(sizes))
    assert changes > 12  # of 31; 3 if batches of a size came one after the other
    again = range(order.batches_per_epoch, 2 * order.batches_per_epoch)
    assert batches(order, numbers) != batches(order, again)
    other = BucketOrder(12, np.repeat(SIZES, 32, axis=0), 4)
    assert batches(order, numbers) != batches(other, numbers)


def test_a_sequential_order_gathers_samples_as_they_come() -> None:
    sizes = SIZES[[0, 1, 0, 1, 1, 0, 0, 1, 2]]
    order = BucketOrder(SEED, sizes, 2, is_sequential=True)
    expected = [[0, 2], [1, 3], [5, 6], [4, 7], [8, PADDING]]
    assert batches(order, range(5)) == batches(order, range(5, 10)) == expected


@pytest.mark.parametrize("count", [1, 7, 12])
def test_a_sequential_order_of_one_size_is_that_of_squares(count: int) -> None:
    order = BucketOrder(SEED, np.repeat(SIZES[:1], count, axis=0), 3, is_sequential=True)
    found = [
        index for batch in batches(order, range(order.batches_per_epoch)) for index in used(batch)
    ]
    assert (
        found == Order(SEED, count, count, is_sequential=True).indices(0, np.arange(count)).tolist()
    )


def test_a_million_samples_are_ordered_in_seconds() -> None:
    sizes = SIZES[np.random.default_rng(0).integers(0, 4, 1_000_000)]
    order = BucketOrder(SEED, sizes, 512)
    assert order.samples(order.batches_per_epoch) == 1_000_000
    assert len(used(batches(order, range(2_148, 2_149))[0])) > 0
