"""What follows from the steps and signs that were seen."""

from __future__ import annotations

import pytest
from tests.faults.timeline import (
    Seen,
    Sign,
    first_sign,
    longest_pause,
    lost_steps,
    seconds_to_new_pod,
)


def seen(*pairs: tuple[float, int]) -> list[Seen]:
    return [Seen(at, step) for at, step in pairs]


@pytest.mark.parametrize(
    ("steps", "lost"),
    [
        ([], 0),
        ([(0, 5)], 0),
        ([(0, 5), (1, 6), (2, 7)], 0),
        ([(0, 17), (1, 10), (2, 11)], 7),
        ([(0, 17), (1, 10), (2, 20), (3, 20)], 7),
        ([(0, 17), (1, 10), (2, 12), (3, 10)], 9),  # twice
        ([(0, 17), (1, 0)], 17),  # from the beginning
    ],
)
def test_lost_steps(steps: list[tuple[float, int]], lost: int) -> None:
    assert lost_steps(seen(*steps)) == lost


@pytest.mark.parametrize(
    ("steps", "pause"),
    [
        ([], 0),
        ([(0, 5)], 0),  # no new step at all: the wait for it fails instead
        ([(0, 5), (10.5, 6)], 0.5),
        ([(0, 5), (11, 6), (15, 7), (16, 8)], 4),
        ([(0, 5), (11, 6), (12, 3), (13, 6), (16, 7)], 5),  # repeated steps are not new
        ([(0, 5), (9, 8), (11, 6), (12, 9)], 2),
    ],
)
def test_longest_pause_from_10_s_on(steps: list[tuple[float, int]], pause: float) -> None:
    assert longest_pause(seen(*steps), 10) == pytest.approx(pause)


def test_the_first_sign_is_that_after_the_fault() -> None:
    signs = [Sign(30, "c"), Sign(5, "a"), Sign(12.5, "b")]
    assert first_sign(signs, 10) == Sign(2.5, "b")
    assert first_sign(signs, 31) is None
    assert first_sign([], 0) is None


@pytest.mark.parametrize(
    ("signs", "seconds"),
    [
        ([], None),
        ([Sign(11, "agent lost"), Sign(12, "event Replaced")], None),
        ([Sign(12, "new pod job-1-rendezvous")], None),
        ([Sign(9, "new pod job-1-0")], None),  # before the fault
        ([Sign(14, "new pod job-1-2"), Sign(12, "new pod job-1-0"), Sign(9, "new pod job-1-1")], 2),
        ([Sign(11, "new pod job-1-rendezvous"), Sign(12.5, "new pod job-1-2")], 2.5),
    ],
)
def test_seconds_from_10_s_on_to_the_first_new_training_pod(
    signs: list[Sign], seconds: float | None
) -> None:
    assert seconds_to_new_pod(signs, 10) == seconds
