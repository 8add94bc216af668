"""The newest start of all ranks fences the others, whatever the order of their writes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from fluxtrain.errors import FencedError, StorageError
from fluxtrain.state import run_state
from fluxtrain.state.run_state import Fence, claim


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
