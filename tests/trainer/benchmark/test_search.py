"""The search finds the largest batch that fits, in few tries."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxtrain.benchmark.task import batches_up_to, largest_that_fits


@given(
    limit=st.integers(0, 300),
    first=st.integers(1, 300),
    most=st.integers(1, 300),
)
def test_the_largest_that_fits_is_found_in_few_tries(limit: int, first: int, most: int) -> None:
    tried = list[int]()

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= limit

    assert largest_that_fits(fits, first, most) == min(limit, most)
    assert len(tried) == len(set(tried)), "nothing is tried twice"
    assert all(1 <= batch <= most for batch in tried)
    assert len(tried) <= 2 * math.log2(300) + 3


def test_it_doubles_then_bisects() -> None:
    tried = list[int]()

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= 21

    assert largest_that_fits(fits, 4, 256) == 21
    assert tried == [4, 8, 16, 32, 24, 20, 22, 21]


@pytest.mark.parametrize(
    ("largest", "batches"),
    [(0, []), (1, [1]), (2, [1, 2]), (7, [1, 2, 4, 7]), (8, [1, 2, 4, 8])],
)
def test_powers_of_two_and_the_largest_are_measured(largest: int, batches: list[int]) -> None:
    assert batches_up_to(largest) == batches
