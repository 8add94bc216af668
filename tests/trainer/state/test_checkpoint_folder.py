"""Starts that write to one folder of checkpoints: the newest start fences the others."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from fluxtrain.errors import FencedError, StorageError
from fluxtrain.state import folder as checkpoint_folder
from fluxtrain.state import run_state
from fluxtrain.state.folder import CheckpointFolder
from fluxtrain.state.run_state import DONE, Fence, claim, complete, latest, step_of


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


def is_fenced(start: Fence) -> bool:
    try:
        start.check()
    except FencedError:
        return True
    return False


def test_only_the_newest_start_may_write(tmp_path: Path) -> None:
    folder, starts = tmp_path / "run" / "checkpoints", list[Fence]()
    for number in range(1, 5):
        starts.append(claim(folder))
        assert starts[-1].start == number
        assert [is_fenced(start) for start in starts] == [True] * (number - 1) + [False]
    assert [path.name for path in folder.iterdir()] == [".start_000004"]


@pytest.mark.parametrize(
    ("names", "after", "expected"),
    [
        ((), 0, 1),
        ((), 7, 8),
        ((".start_000003",), 7, 8),
        ((".start_000009",), 7, 10),
        ((".start_1000000",), 0, 1000001),
        ((".start_x", "start_5", ".start_", ".start_6.partial", "step_0000000009"), 0, 1),
    ],
)
def test_a_start_has_a_number_above_all_before(
    tmp_path: Path, names: tuple[str, ...], after: int, expected: int
) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert claim(tmp_path, after).start == expected


def test_no_two_starts_have_the_same_number(tmp_path: Path) -> None:
    def try_to_claim(number: int) -> list[Fence]:
        with suppress(FencedError):
            return [claim(tmp_path)]
        return []

    with ThreadPoolExecutor(8) as pool:
        starts = [start for found in pool.map(try_to_claim, range(40)) for start in found]
    assert len({start.start for start in starts}) == len(starts) > 0
    newest = max(starts, key=lambda start: start.start)
    assert [start for start in starts if not is_fenced(start)] == [newest]
    assert list(tmp_path.iterdir()) == [newest.path]


def test_a_start_that_is_frozen_before_it_has_its_file_fences_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    created, others = run_state._created, list[Fence]()

    def create(path: Path) -> bool:
        if not others:
            others.append(Fence(tmp_path, 0))  # the ones below do not come here
            others.extend(claim(tmp_path) for _ in range(3))
        return created(path)

    monkeypatch.setattr(run_state, "_created", create)
    with pytest.raises(FencedError):
        claim(tmp_path)
    assert [is_fenced(start) for start in others[1:]] == [True, True, False]


def test_a_start_that_this_node_does_not_see_yet_keeps_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unseen = claim(tmp_path)
    monkeypatch.setattr(run_state, "_starts", lambda folder: [])  # as a client of NFS may see it
    assert claim(tmp_path).start == unseen.start + 1


def test_the_error_names_the_output_and_is_restarted_by_the_agent(tmp_path: Path) -> None:
    old = claim(tmp_path / "run" / "checkpoints")
    claim(old.folder)
    with pytest.raises(
        FencedError, match=r"run: a newer start of this run .* start 1 ends"
    ) as raised:
        old.check()
    assert raised.value.exit_code == 1


def test_a_file_in_place_of_the_folder_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    with pytest.raises(StorageError, match=r"checkpoints: cannot be written \(File exists\)"):
        claim(tmp_path / "checkpoints")
