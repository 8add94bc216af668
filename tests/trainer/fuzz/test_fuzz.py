"""A few changed inputs of every reader: errors in plain text, nothing else; `make fuzz` tries more."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.trainer.fuzz.fuzzing import Finding, check, fuzz
from tests.trainer.fuzz.target import Target
from tests.trainer.fuzz.targets import targets


@pytest.mark.parametrize("examples", [5, pytest.param(40, marks=pytest.mark.proof)])
def test_changed_inputs_are_read_or_refused(examples: int) -> None:
    results = fuzz(list(targets()), seconds=0, examples=examples)
    assert [result for result in results if result.finding] == []
    assert [result.name for result in results] == list(targets())


@pytest.mark.parametrize("name", targets())
def test_the_inputs_to_begin_from_are_valid(tmp_path: Path, name: str) -> None:
    target = targets()[name]
    for content in target.seeds():
        (tmp_path / target.file).write_bytes(content)
        check(target, tmp_path / target.file)


def test_what_may_not_happen_is_found(tmp_path: Path) -> None:
    def crash(path: Path) -> object:
        raise KeyError(path.name)

    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(Finding, match="uncaught KeyError"):
        check(Target("a", crash, lambda: [b""]), tmp_path / "a")
