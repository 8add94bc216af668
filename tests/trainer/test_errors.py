"""Errors show the given value as the file has it."""

from __future__ import annotations

import pytest

from fluxtrain.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (None, "null"),
        (True, "true"),
        (False, "false"),
        ("None", "'None'"),
        (1, "1"),
        (1e-4, "0.0001"),
        ([None, "a", [True]], "[null, 'a', [true]]"),
        ((1, False), "[1, false]"),
        ({"a": None, True: {"b": [1]}}, "{'a': null, true: {'b': [1]}}"),
        ([], "[]"),
        ({}, "{}"),
        ("/tmp/" + "x" * 100 + "/a.json", f"'/tmp/{'x' * 31}...{'x' * 32}/a.json'"),
        ([0] * 100_000, f"[{'0, ' * 12}..., {'0, ' * 12}0]"),
    ],
)
def test_a_given_value_is_shown_in_the_words_of_yaml(given: object, shown: str) -> None:
    assert str(ConfigError("a", given, "must be b")) == f"a: got {shown}; must be b"


def test_a_value_that_is_nested_deeply_is_shown_in_part() -> None:
    given: object = 1
    for _ in range(900):
        given = [given]
    assert str(ConfigError("a", given, "must be b")) == f"a: got {'[' * 37}...{']' * 40}; must be b"
