"""What may still be written to memory: the least that the volume, the machine and the cgroups allow."""

from __future__ import annotations

from pathlib import Path

import pytest

from fluxtrain.snapshots import free_memory as module
from fluxtrain.snapshots.free_memory import free_memory, require_free

Files = dict[str, str]
MIB = 1 << 20
V2 = {"proc/self/cgroup": "0::/pod/trainer\n"}
V1 = {"proc/self/cgroup": "5:cpu:/x\n4:memory:/pod\n0::/\n"}


def v2(folder: str, limit: str, current: int, inactive: int = 0) -> Files:
    at = f"sys/fs/cgroup/{folder}"
    return {
        f"{at}/memory.max": f"{limit}\n",
        f"{at}/memory.current": f"{current}\n",
        f"{at}/memory.stat": f"anon 1\ninactive_file {inactive}\n",
    }


def v1(folder: str, limit: int, usage: int, inactive: int = 0) -> Files:
    at = f"sys/fs/cgroup/memory/{folder}"
    return {
        f"{at}/memory.limit_in_bytes": f"{limit}\n",
        f"{at}/memory.usage_in_bytes": f"{usage}\n",
        f"{at}/memory.stat": f"inactive_file 7\ntotal_inactive_file {inactive}\n",
    }


ROWS: list[tuple[str, Files, int]] = [
    ("no cgroup can be seen", {}, 900),
    ("no limit", V2 | v2("pod/trainer", "max", 500), 900),
    ("a limit", V2 | v2("pod/trainer", "1000", 400), 600),
    ("page cache that the kernel frees", V2 | v2("pod/trainer", "1000", 400, 100), 700),
    ("a limit of the pod", V2 | v2("pod/trainer", "max", 1) | v2("pod", "300", 100), 200),
    ("a container sees only its root", V2 | v2("", "500", 100), 400),
    ("outside of its own namespace", {"proc/self/cgroup": "0::/../x\n"} | v2("", "500", 1), 499),
    ("above the limit", V2 | v2("pod/trainer", "100", 200), 0),
    ("version 1", V1 | v1("pod", 1000, 400, 100), 700),
    ("version 1 without a limit", V1 | v1("pod", 1 << 62, 400), 900),
    ("damaged files", V2 | {"sys/fs/cgroup/pod/trainer/memory.max": "1 2\n"}, 900),
]


@pytest.mark.parametrize(("files", "expected"), [row[1:] for row in ROWS], ids=[r[0] for r in ROWS])
def test_the_least_counts(tmp_path: Path, files: Files, expected: int) -> None:
    base = {"proc/meminfo": f"MemTotal: 9 kB\nMemAvailable: {900 * MIB // 1024} kB\n"}
    for name, text in (base | files).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_in_mib(text) if "sys/fs" in name else text)
    assert free_memory(tmp_path, tmp_path) // MIB == expected


def _in_mib(text: str) -> str:
    """Return ``text`` with its last number on each line as MiB."""
    lines = (line.rpartition(" ") for line in text.splitlines())
    scaled = ((a + b, str(int(c) * MIB) if c.isdecimal() else c) for a, b, c in lines)
    return "".join(f"{before}{number}\n" for before, number in scaled)


def test_half_of_the_free_memory_stays_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "free_memory", lambda volume: 1000)
    require_free(tmp_path, 500)
    with pytest.raises(OSError, match="a node needs"):
        require_free(tmp_path, 501)
