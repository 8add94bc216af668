"""The order of samples of several sizes: one size a batch, each sample once per epoch."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxtrain.data.order import PADDING, BatchShares, BucketOrder, Order
from fluxtrain.runtime.draws import Array

SEED = 11
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
def test_a_batch_is_the_same_after_others_and_as_the_first(
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
