"""What may still be written to memory, and how often that is looked at; the launcher removes what is left."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from fluxtrain.launch.environment import emptied
from fluxtrain.state import free_memory as module
from fluxtrain.state.free_memory import (
    Bound,
    MemoryWatch,
    bounds,
    require_room,
    require_spare,
    reserve_of,
)

Files = dict[str, str]
MIB = 1 << 20
V2 = {"proc/self/cgroup": "0::/pod/trainer\n"}
V1 = {"proc/self/cgroup": "5:cpu:/x\n4:memory:/pod\n0::/\n"}


def v2(folder: str, limit: str, current: int, **stat: int) -> Files:
    at = f"sys/fs/cgroup/{folder}"
    return {
        f"{at}/memory.max": f"{limit}\n",
        f"{at}/memory.current": f"{current}\n",
        f"{at}/memory.stat": "anon 1\n" + "".join(f"{key} {n}\n" for key, n in stat.items()),
    }


def v1(folder: str, limit: int, usage: int, **stat: int) -> Files:
    at = f"sys/fs/cgroup/memory/{folder}"
    return {
        f"{at}/memory.limit_in_bytes": f"{limit}\n",
        f"{at}/memory.usage_in_bytes": f"{usage}\n",
        f"{at}/memory.stat": "inactive_file 7\ncache 900\n"
        + "".join(f"total_{key} {n}\n" for key, n in stat.items()),
    }


ROWS: list[tuple[str, Files, int]] = [
    ("no cgroup can be seen", {}, 900),
    ("no limit", V2 | v2("pod/trainer", "max", 500), 900),
    ("a limit", V2 | v2("pod/trainer", "1000", 400), 600),
    ("page cache read once", V2 | v2("pod/trainer", "1000", 400, inactive_file=100), 700),
    ("page cache read again", V2 | v2("pod/trainer", "1000", 400, active_file=100), 700),
    ("names of files", V2 | v2("pod/trainer", "1000", 400, slab_reclaimable=9), 609),
    (
        "page cache that is not written yet",
        V2 | v2("pod/trainer", "1000", 400, inactive_file=100, file_dirty=30, file_writeback=20),
        650,
    ),
    ("more is unwritten than cached", V2 | v2("pod/trainer", "1000", 400, file_dirty=30), 600),
    ("memory of tmpfs is not freed", V2 | v2("pod/trainer", "1000", 400, shmem=300), 600),
    ("a limit of the pod", V2 | v2("pod/trainer", "max", 1) | v2("pod", "300", 100), 200),
    ("a container sees only its root", V2 | v2("", "500", 100), 400),
    ("outside of its own namespace", {"proc/self/cgroup": "0::/../x\n"} | v2("", "500", 1), 499),
    ("above the limit", V2 | v2("pod/trainer", "100", 200), 0),
    ("version 1", V1 | v1("pod", 1000, 400, inactive_file=100, active_file=50, dirty=20), 730),
    ("version 1, memory of tmpfs", V1 | v1("pod", 1000, 400, shmem=300), 600),
    ("version 1 without a limit", V1 | v1("pod", 1 << 42, 400), 900),
    ("damaged files", V2 | {"sys/fs/cgroup/pod/trainer/memory.max": "1 2\n"}, 900),
]


@pytest.mark.parametrize(("files", "expected"), [row[1:] for row in ROWS], ids=[r[0] for r in ROWS])
def test_the_least_counts(tmp_path: Path, files: Files, expected: int) -> None:
    kb = MIB // 1024
    base = {"proc/meminfo": f"MemTotal: {1000 * kb} kB\nMemAvailable: {900 * kb} kB\n"}
    for name, text in (base | files).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_in_mib(text) if "sys/fs" in name else text)
    assert min(bound.free for bound in bounds(tmp_path, tmp_path)) // MIB == expected


def _in_mib(text: str) -> str:
    """Return ``text`` with its last number on each line as MiB."""
    lines = (line.rpartition(" ") for line in text.splitlines())
    scaled = ((a + b, str(int(c) * MIB) if c.isdecimal() else c) for a, b, c in lines)
    return "".join(f"{before}{number}\n" for before, number in scaled)


def test_without_meminfo_the_volume_counts(tmp_path: Path) -> None:
    (bound,) = bounds(tmp_path, tmp_path)
    assert (bound.name, bound.reserve) == (str(tmp_path), 0)


def test_data_loaders_need_a_reserve_in_dev_shm() -> None:
    (bound,) = bounds(module.SHARED_MEMORY, Path("/nowhere"))
    assert bound.reserve == reserve_of(bound.limit) > 0


@pytest.mark.parametrize(
    ("limit_mib", "reserve_mib"),
    [
        (0, 0),
        (64, 16),
        (1024, 256),
        (2048, 256),
        (16 * 256, 256),
        (32 * 1024, 2048),
        (128 * 1024, 8192),
        (1 << 40, 8192),
    ],
)
def test_the_reserve(limit_mib: int, reserve_mib: int) -> None:
    assert reserve_of(limit_mib * MIB) == reserve_mib * MIB


def test_what_new_snapshots_may_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = Bound("the machine", 10_000, 5_000, 1_000)
    small = Bound("the memory cgroup", 2_000, 1_000, 100)
    monkeypatch.setattr(module, "bounds", lambda volume: iter((large, small)))
    require_room(tmp_path, 800)  # two reserves are left
    with pytest.raises(OSError, match="a node needs") as refused:
        require_room(tmp_path, 801)
    assert "of the memory cgroup are free" in str(refused.value)
    require_spare(tmp_path, 900)  # one is left
    with pytest.raises(OSError, match="the memory cgroup"):
        require_spare(tmp_path, 901)


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
