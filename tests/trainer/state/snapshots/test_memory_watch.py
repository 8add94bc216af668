"""The free memory is looked at the more often, the less there is; the launcher removes what trainers left."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from fluxtrain.launch.environment import emptied
from fluxtrain.state import free_memory as module
from fluxtrain.state.free_memory import Bound, MemoryWatch

GB = 1_000_000_000


def bound(free: int) -> Bound:
    return Bound("the machine", 100 * GB, free, 6 * GB)


@pytest.mark.parametrize(
    ("free", "part", "seconds", "short"),
    [
        (100 * GB, 1.0, 1.0, 0),
        (14 * GB, 1.0, 1.0, 0),
        (10 * GB, 1.0, 0.5, 0),
        (6 * GB, 1.0, 0.05, 0),
        (6 * GB - 1, 1.0, 0.05, 1),
        (0, 1.0, 0.05, 1),
        (6 * GB - 1, 0.5, 0.375, 0),
        (3 * GB - 1, 0.5, 0.05, 1),
    ],
)
def test_a_look(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    part: float,
    seconds: float,
    short: int,
) -> None:
    monkeypatch.setattr(module, "tightest", lambda volume: bound(free))
    told = list[Bound]()

    def on_short(bound: Bound) -> bool:
        told.append(bound)
        return len(told) == 1

    watch = MemoryWatch(tmp_path, on_short, part)
    assert watch.look() == pytest.approx(seconds)
    assert told == [bound(free)] * short
    if short:
        assert watch.look() == 0.25, "there was nothing left to free"


def test_a_volume_that_is_gone_is_no_shortage(tmp_path: Path) -> None:
    assert MemoryWatch(tmp_path / "gone", pytest.fail).look() == 1.0


def test_it_looks_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "tightest", lambda volume: bound(0))
    looked = threading.Semaphore(0)

    def on_short(bound: Bound) -> bool:
        looked.release()
        return True

    with MemoryWatch(tmp_path, on_short):
        assert all(looked.acquire(timeout=60) for _ in range(3))
    while looked.acquire(blocking=False):
        pass
    assert not looked.acquire(timeout=0.2)


def test_without_trainers_the_launcher_removes_snapshots_when_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = [5 * GB]  # less than the reserve, more than half of it
    looks = threading.Semaphore(0)

    def look(volume: Path) -> Bound:
        looks.release()
        return bound(left[0])

    monkeypatch.setattr(module, "tightest", look)
    folder = tmp_path / "start_000001"
    folder.mkdir()
    for name in ("rank_00000_0.image", "rank_00000_0.json", "config.json"):
        (folder / name).write_text("{}")
    with emptied(tmp_path):
        assert all(looks.acquire(timeout=60) for _ in range(2))
        assert len(list(folder.iterdir())) == 3
        left[0] = 2 * GB
        while list(folder.glob("rank_*")):
            assert looks.acquire(timeout=60)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fluxtrain: the snapshots in memory were removed: 2.00 of 100.00 GB")
