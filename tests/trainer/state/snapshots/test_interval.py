"""The interval between snapshots follows from what they cost."""

from __future__ import annotations

import pytest

from fluxtrain.state.snapshots import Cost, next_interval

STEP = 0.1
# steps so far, waited for all, waited for the last one, written in the background, interval before, next one
ROWS = [
    (1000, 0.0, 0.0, 0.0, 10, 1),
    (1000, 0.01, 0.01, 0.0, 10, 10),
    (1000, 0.0101, 0.0101, 0.0, 10, 11),
    (1000, 0.1, 0.1, 6.0, 100, 120),
    (1000, 0.01, 0.01, 30.0, 10, 40),
    (1000, 30.0, 30.0, 0.0, 40, 160),
    (100_000, 1.0, 1.0, 0.0, 10_000, 1000),
    (1000, 5.0, 0.001, 0.0, 1000, 4000),
    (5000, 5.0, 0.05, 0.0, 1000, 50),
]


@pytest.mark.parametrize(("steps", "stalled", "last", "background", "before", "expected"), ROWS)
def test_the_interval(
    steps: int, stalled: float, last: float, background: float, before: int, expected: int
) -> None:
    cost = Cost(steps, steps * STEP, stalled, last, background)
    assert next_interval(cost, before) == expected


def test_a_clock_that_has_not_moved_changes_little() -> None:
    assert next_interval(Cost(10, 0.0, 0.1, 0.1, 0.1), 10) == 10


@pytest.mark.parametrize("stall", [0.0, 0.02, 0.5, 10.0])
def test_all_snapshots_together_soon_cost_at_most_one_percent(stall: float) -> None:
    steps, stalled, interval = 0, 0.0, 10
    for _ in range(12):
        steps += interval
        stalled += stall
        interval = next_interval(Cost(steps, steps * STEP, stalled, stall, 0.0), interval)
    assert stalled <= 0.0101 * (steps + interval) * STEP


def test_after_one_slow_snapshot_others_follow() -> None:
    slow = Cost(1000, 100.0, 60.0, 60.0, 0.0)
    assert next_interval(slow, 10) == 40
