"""Members: what the operator reads of the rendezvous service's answer."""

from __future__ import annotations

import pytest

from fluxtrain_operator.members import Members


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (None, None),
        ([], None),
        ({}, None),
        ({"attempt": "1"}, None),
        ({"attempt": True}, None),
        ({"attempt": 2}, Members(2)),
        ({"attempt": 2, "alive": "a", "lostSeconds": ["b"]}, Members(2)),
        ({"attempt": 2, "alive": ["a.1", 7, None]}, Members(2, frozenset({"a"}))),
        (
            {"attempt": 2, "alive": ["a.1"], "lostSeconds": {"a.0": 9, "b.1": 7.5}},
            Members(2, frozenset({"a"}), frozenset({"b"})),
        ),
    ],
)
def test_invalid_values_are_left_out(answer: object, expected: Members | None) -> None:
    assert Members.from_json(answer) == expected
