"""Which rank is a straggler, by the own times of all ranks over several log steps."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from fluxtrain.report.stragglers import NUM_LOG_STEPS, Straggler, StragglerSearch
from fluxtrain.runtime.step_times import RankTimes

STEP_SECONDS = 2.0


def search(*log_steps: tuple[float, ...], cause: str = "compute") -> Straggler | None:
    """Return the straggler after log steps with these seconds of computing, or of waiting for data."""
    stragglers, found = StragglerSearch(1.2), None
    for seconds in log_steps:
        found = stragglers.add([_times(one, cause) for one in seconds], STEP_SECONDS)
    return found


def _times(seconds: float, cause: str) -> RankTimes:
    """Return times of a rank that differ from other ranks' in ``cause`` only."""
    return replace(RankTimes(1.0, 0.0, 2.0, 0.0), **{cause: seconds})


@pytest.mark.parametrize(
    ("seconds", "rank", "slowdown"),
    [
        ((1.0,), None, 0),  # alone
        ((5.0,), None, 0),
        ((1.0, 1.5), 1, 1.5),
        ((1.5, 1.0), 0, 1.5),
        ((1.0, 1.2), None, 0),  # by the factor, not by more
        ((1.0, 1.0, 1.0), None, 0),
        ((1.0, 1.3, 1.0), 1, 1.3),
        ((1.0, 1.3, 1.6), 2, 1.6 / 1.3),
        ((0.1, 1.0, 1.0), None, 0),  # fast is not slow
        ((1.0, 1.1, 0.9, 1.0, 3.0), 4, 3.0),
        ((2.0, 2.0, 1.0, 1.0, 1.0), 0, 2.0),  # several: the first of the slowest
        ((0.0, 0.0, 0.0), None, 0),  # nothing measured
        ((0.0, 0.0, 1.0), 2, 1000.0),
    ],
)
@pytest.mark.parametrize("cause", ["compute", "backward"])
def test_a_rank_that_computes_longer_than_the_median(
    seconds: tuple[float, ...], rank: int | None, slowdown: float, cause: str
) -> None:
    found = search(*[seconds] * NUM_LOG_STEPS, cause=cause)
    assert (found.rank if found else None) == rank
    if found is not None:
        assert (found.cause, found.slowdown) == (cause, pytest.approx(slowdown))


@pytest.mark.parametrize(
    ("seconds", "rank", "slowdown"),
    [
        ((1.5,), None, 0),
        ((0.0, 0.0), None, 0),
        ((0.001, 0.01), None, 0),  # ten times as long, but it does not delay a step
        ((0.0, 1.0), 1, 2.0),
        ((0.5, 0.5, 1.0), 2, 2.0 / 1.5),
        ((1.5, 1.5, 1.5), None, 0),  # all wait
        ((0.0, 0.0, 0.0, 0.0, 2.0), 4, 1000.0),  # a step is nothing but its wait
        ((0.0, 0.0, 9.0), 2, 1000.0),  # longer than a step, by rounding
    ],
)
@pytest.mark.parametrize("cause", ["data", "optimizer"])
def test_a_rank_whose_excess_makes_steps_longer(
    seconds: tuple[float, ...], rank: int | None, slowdown: float, cause: str
) -> None:
    found = search(*[seconds] * NUM_LOG_STEPS, cause=cause)
    assert (found.rank if found else None) == rank
    if found is not None:
        assert (found.cause, found.slowdown) == (cause, pytest.approx(slowdown))


def test_of_several_causes_that_of_the_largest_slowdown_is_named() -> None:
    stragglers, found = StragglerSearch(1.2), None
    for _ in range(NUM_LOG_STEPS):
        slow = RankTimes(compute=1.5, data=0.5, backward=6.0, optimizer=0.9)
        others = RankTimes(compute=1.0, data=0.0, backward=2.0, optimizer=0.1)
        found = stragglers.add([others, slow, others], STEP_SECONDS)
    assert found is not None
    assert (found.rank, found.cause, found.slowdown) == (1, "backward", pytest.approx(3.0))


@pytest.mark.parametrize(
    ("cause", "num_slow", "is_straggler"),
    [
        ("compute", 0, False),
        ("compute", 1, False),  # one slow step, however long
        ("compute", NUM_LOG_STEPS - 1, False),
        ("compute", NUM_LOG_STEPS, True),
        ("backward", NUM_LOG_STEPS - 1, False),
        ("backward", NUM_LOG_STEPS, True),
        ("optimizer", NUM_LOG_STEPS - 1, False),
        ("optimizer", NUM_LOG_STEPS, True),
        ("data", 1, False),
        ("data", 4, False),
        ("data", 5, True),  # stalls come in bursts
        ("data", NUM_LOG_STEPS, True),
    ],
)
def test_a_straggler_is_slow_in_all_or_most_log_steps(
    cause: str, num_slow: int, is_straggler: bool
) -> None:
    slow, even = [(0.5, 0.5, 0.5, 2.0)] * num_slow, [(0.5,) * 4] * (NUM_LOG_STEPS - num_slow)
    assert (search(*even, *slow, cause=cause) is not None) == is_straggler
    assert (search(*slow, *even, cause=cause) is not None) == is_straggler


def test_chance_names_nobody() -> None:
    chance, stragglers = random.Random(1), StragglerSearch(1.2)
    for _ in range(1000):
        times = [
            RankTimes(chance.gauss(1.0, 0.15), 0.0, chance.gauss(2.0, 0.3), chance.gauss(0.1, 0.05))
            for _ in range(5)
        ]
        assert stragglers.add(times, STEP_SECONDS) is None


def test_nothing_is_said_before_enough_log_steps() -> None:
    assert search(*[(1.0, 9.0)] * (NUM_LOG_STEPS - 1)) is None


def test_a_rank_that_recovers_is_no_straggler_any_more() -> None:
    slow = [(1.0, 9.0)] * NUM_LOG_STEPS
    assert search(*slow, *[(1.0, 1.0)] * 3) is not None
    assert search(*slow, *[(1.0, 1.0)] * 5) is None
    assert search(*slow, *[(1.0, 1.0)] * 5, *[(1.0, 9.0)] * 7) is None, (
        "it must be slow in all anew"
    )


def test_different_ranks_in_turn_are_no_straggler() -> None:
    turns = [tuple(9.0 if rank == step % 3 else 1.0 for rank in range(3)) for step in range(9)]
    assert search(*turns) is None
