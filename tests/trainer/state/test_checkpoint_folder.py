"""Starts that write to one folder of checkpoints: only whole folders of the newest start become complete."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fluxtrain.errors import FencedError
from fluxtrain.state import folder as checkpoint_folder
from fluxtrain.state.folder import CheckpointFolder
from fluxtrain.state.run_state import DONE, claim, complete, latest, step_of


def begin(folder: CheckpointFolder, step: int) -> None:
    """Write a whole checkpoint, which is not committed."""
    folder.begin(step)
    (folder.partial(step) / "shard").write_text(f"start {folder.fence.start}")
    (folder.partial(step) / DONE).touch()


def save(folder: CheckpointFolder, *steps: int, keep: int = 2) -> None:
    for step in steps:
        begin(folder, step)
        folder.commit(step)
        folder.keep_newest(keep, lambda: None)


def steps(path: Path) -> list[int]:
    return [step_of(checkpoint) for checkpoint in complete(path)]


def names(path: Path) -> set[str]:
    return {found.name for found in path.iterdir()}


def writer(path: Path, step: int) -> str:
    return (path / f"step_{step:010d}" / "shard").read_text()


def start(path: Path) -> CheckpointFolder:
    """Return the folder as a new start of the ranks has it."""
    folder = CheckpointFolder(claim(path))
    folder.take_over()
    return folder


def test_a_checkpoint_is_complete_when_it_is_committed_and_old_ones_are_removed(
    tmp_path: Path,
) -> None:
    folder = start(tmp_path)
    begin(folder, 10)
    assert latest(tmp_path) is None
    folder.commit(10)
    assert steps(tmp_path) == [10]
    save(folder, 20, 30, 40)
    assert names(tmp_path) == {".start_000001", "step_0000000030", "step_0000000040"}


@pytest.mark.parametrize(
    "action",
    [
        lambda folder: folder.begin(40),
        lambda folder: folder.commit(30),
        lambda folder: folder.keep_newest(1, lambda: None),
    ],
)
def test_ranks_that_were_left_behind_change_nothing(
    tmp_path: Path, action: Callable[[CheckpointFolder], None]
) -> None:
    old = start(tmp_path)
    save(old, 10, 20)
    begin(old, 30)
    fence = claim(tmp_path)
    before = names(tmp_path)
    with pytest.raises(FencedError):
        action(old)
    assert names(tmp_path) - before == set()
    assert before - names(tmp_path) <= {"partial_000001_step_0000000030"}, "its own"
    save(CheckpointFolder(fence), 25, 35)
    assert names(tmp_path) == {".start_000002", "step_0000000025", "step_0000000035"}


def test_what_was_checked_before_a_new_start_is_not_committed_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new start begins between the check and the rename, and looks for the newest checkpoint."""
    old, seen = start(tmp_path), list[list[int]]()
    save(old, 10)
    begin(old, 20)
    rename = checkpoint_folder._renamed

    def late(source: Path, target: Path) -> bool:
        start(tmp_path)
        seen.append(steps(tmp_path))
        return rename(source, target)

    monkeypatch.setattr(checkpoint_folder, "_renamed", late)
    with pytest.raises(FileNotFoundError):
        old.commit(20)
    assert seen == [steps(tmp_path)] == [[10]]


def test_what_was_committed_before_a_new_start_looks_is_found(tmp_path: Path) -> None:
    old = start(tmp_path)
    begin(old, 20)
    fence = claim(tmp_path)
    (old.partial(20)).rename(tmp_path / "step_0000000020")  # had been checked
    CheckpointFolder(fence).take_over()
    assert steps(tmp_path) == [20]


def test_a_new_start_removes_what_earlier_ones_left_but_nothing_of_its_own(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        begin(start(tmp_path), step)
    own = start(tmp_path)
    assert not any(name.startswith("partial") for name in names(tmp_path))
    begin(own, 40)
    begin(own, 50)  # the one before is still being written
    own.take_over()
    assert names(tmp_path) == {
        ".start_000004",
        "partial_000004_step_0000000040",
        "partial_000004_step_0000000050",
    }


def test_a_folder_that_is_still_written_to_while_it_is_removed_is_removed_later(
    tmp_path: Path,
) -> None:
    old = start(tmp_path)
    begin(old, 10)
    new = start(tmp_path)
    old.partial(10).mkdir()  # a rank writes another file
    (old.partial(10) / "late").touch()
    save(new, 20)
    save(new, 30)
    assert names(tmp_path) == {".start_000002", "step_0000000020", "step_0000000030"}


def test_two_starts_that_commit_the_same_step_leave_one_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = start(tmp_path), start(tmp_path)
    save(second, 10)
    monkeypatch.setattr(type(first.fence), "check", lambda fence: None)
    save(first, 10)
    assert writer(tmp_path, 10) == "start 2"
    assert names(tmp_path) == {".start_000002", "step_0000000010"}


def test_an_incomplete_folder_of_an_older_version_is_replaced(tmp_path: Path) -> None:
    left = tmp_path / "step_0000000010"
    left.mkdir()
    (left / "shard").write_text("half")
    (tmp_path / "step_0000000020").mkdir()
    save(start(tmp_path), 10, 20)
    assert [writer(tmp_path, step) for step in (10, 20)] == ["start 1", "start 1"]
    assert steps(tmp_path) == [10, 20]


def test_ranks_that_were_left_behind_keep_the_newest_of_all_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were frozen between the check and the list of what to remove."""
    old = start(tmp_path)
    save(old, 10, 20)
    new = start(tmp_path)
    save(new, 30, 40, 50, keep=3)
    monkeypatch.setattr(type(old.fence), "check", lambda fence: None)
    old.keep_newest(1, lambda: None)
    assert steps(tmp_path) == [50]
    save(new, 60, keep=3)
    assert steps(tmp_path) == [50, 60]
