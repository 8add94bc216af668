"""Durations for people, over the whole range."""

from __future__ import annotations

import pytest

from fluxtrain_operator.base.names import duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0s"),
        (0, "0s"),
        (0.9, "0s"),
        (59.9, "59s"),
        (60, "1m"),
        (61, "1m1s"),
        (3599, "59m59s"),
        (3600, "1h"),
        (3605, "1h"),
        (7800, "2h10m"),
        (86_400, "1d"),
        (86_460, "1d"),
        (273_600, "3d4h"),
        (1e9, "11574d1h"),
    ],
)
def test_a_duration_has_at_most_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text
