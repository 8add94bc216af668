"""When something changed, by the operator's clock, whatever the clock of its node says."""

from __future__ import annotations

import pytest

from fluxtrain_operator.base.names import Transition, transition

NOW, HOUR = 1_800_000_000.0, 3600.0


@pytest.mark.parametrize(
    ("told", "before", "is_watched", "time"),
    [
        (NOW - 2, None, True, NOW),
        (NOW + HOUR, None, True, NOW),
        (NOW - HOUR, None, True, NOW),
        # not watched: between the creation, 100 s ago, and now
        (NOW - 2, None, False, NOW - 2),
        (NOW, None, False, NOW),
        (NOW + HOUR, None, False, NOW),
        (NOW - HOUR, None, False, NOW - 100),
        # the same transition again, by a later leader's clock too
        (NOW - HOUR, Transition(NOW - HOUR, NOW - 50), True, NOW - 50),
        (NOW + HOUR, Transition(NOW + HOUR, NOW - 50), False, NOW - 50),
        (NOW + HOUR, Transition(NOW + HOUR, NOW + 7), True, NOW + 7),
        # another one, after it or before it
        (NOW + HOUR + 1, Transition(NOW + HOUR, NOW - 50), True, NOW),
        (NOW - HOUR, Transition(NOW + HOUR, NOW - 50), True, NOW),
    ],
)
def test_a_transition_has_a_time_of_the_operator(
    told: float, before: Transition | None, is_watched: bool, time: float
) -> None:
    found = transition(told, before, is_watched=is_watched, earliest=NOW - 100, now=NOW)
    assert found == Transition(told, time)
    assert told + found.shift == time


def test_nothing_is_later_than_now_even_if_the_object_was_created_later() -> None:
    found = transition(NOW - HOUR, None, is_watched=False, earliest=NOW + 9, now=NOW)
    assert found.time == NOW


def test_times_are_whole_seconds_as_those_of_kubernetes() -> None:
    assert transition(NOW, None, is_watched=True, earliest=0.0, now=NOW + 0.9).time == NOW
