"""Heard: what the operator reads of the rendezvous service's answer."""

from __future__ import annotations

import pytest

from fluxtrain_operator.members import Heard


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (None, None),
        ([], None),
        ({}, None),
        ({"attempt": "1"}, None),
        ({"attempt": True}, None),
        ({"attempt": 2}, Heard()),
        ({"attempt": 2, "alive": "a", "lostSeconds": ["b"]}, Heard()),
        ({"attempt": 2, "alive": ["a.1", 7, None]}, Heard(frozenset({"a"}))),
        (
            {"attempt": 2, "alive": ["a.1"], "lostSeconds": {"a.0": 9, "b.1": 7.5}},
            Heard(frozenset({"a"}), frozenset({"b"})),
        ),
    ],
)
def test_invalid_values_are_left_out(answer: object, expected: Heard | None) -> None:
    assert Heard.from_json(answer) == expected
