"""Random bits that follow from a key and a counter: SplitMix64's, for any range."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from fluxtrain.optim.optimizer import LANES, Range, key_of, random_numbers

CPU = torch.device("cpu")
FIRST = 0xE220A8397B1DCDAF
"""The first output of SplitMix64 with the seed 0, as published."""
WORD = (1 << 64) - 1


def split_mix(number: int) -> int:
    """Return output ``number``, from 1, of SplitMix64 with the seed 0, in Python's integers."""
    z = number * 0x9E3779B97F4A7C15 & WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & WORD
    return z ^ z >> 31


def numbers(*ranges: tuple[int, int, int]) -> list[int]:
    return [n & 0xFFFF for n in random_numbers([Range(*each) for each in ranges], CPU).tolist()]


def expected(key: int, begin: int, count: int) -> list[int]:
    return [
        split_mix(key + n // LANES) >> 16 * (n % LANES) & 0xFFFF
        for n in range(begin, begin + count)
    ]


def test_numbers_are_those_of_split_mix() -> None:
    assert split_mix(1) == FIRST
    assert numbers((1, 0, 4)) == [FIRST >> shift & 0xFFFF for shift in (0, 16, 32, 48)]
    for key in (0, 1, key_of("a"), (1 << 62) - 1):
        assert numbers((key, 0, 50)) == expected(key, 0, 50)


@pytest.mark.parametrize("cuts", [(1, 2, 3), (4, 5, 49), (17, 30, 31), (0, 50, 50)])
def test_parts_have_the_numbers_of_the_whole(cuts: tuple[int, ...]) -> None:
    key = key_of(7, 1, "weight")
    parts = [(key, begin, end - begin) for begin, end in pairwise((0, *cuts, 50))]
    assert numbers(*parts) == expected(key, 0, 50)
    assert numbers((5, 9, 2), *parts)[2:] == expected(key, 0, 50)


def test_numbers_are_even_and_streams_have_nothing_in_common() -> None:
    count = 1 << 18
    keys = [key_of(seed, step, name) for seed in (0, 1) for step in (1, 2) for name in "ab"]
    streams = [random_numbers([Range(key, 0, count)], CPU).double() / 2**15 for key in keys]
    for stream in streams:
        assert abs(stream.mean()) < 6 / (3 * count) ** 0.5  # six standard deviations
        assert stream.square().mean().item() == pytest.approx(
            1 / 3, abs=6 * (4 / 45 / count) ** 0.5
        )
        assert abs((stream[1:] * stream[:-1]).mean()) < 6 / 3 / count**0.5
    products = torch.stack(streams) @ torch.stack(streams).T / count
    assert (products - torch.eye(len(keys)) / 3).abs().max() < 6 / 3 / count**0.5


def test_keys_differ_where_any_part_does() -> None:
    keys = {key_of(*parts) for parts in (("a", 1), ("a", 2), ("b", 1), ("a", 11), ("a1", 1))}
    assert len(keys) == 5
    assert all(0 <= key < 1 << 62 for key in keys)
