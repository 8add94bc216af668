"""A cgroup for each node, in every controller; the kubelet's pods are below it."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from cluster.errors import ClusterError

ROOT = Path("/sys/fs/cgroup")
UNIFIED_CONTROLLERS = "+cpuset +cpu +io +memory +pids"
INHERITED = ("cpuset.cpus", "cpuset.mems")
"""Files that are empty in a new cgroup of version 1 and must be set before it accepts processes."""
SHARES = {"cpu.shares": "2048", "cpu.weight": "200"}
"""All pods of a node together get twice the processor time of one busy process of the machine, not once."""


def create(name: str) -> None:
    """Create the cgroup ``name`` of version 1 or 2."""
    if _is_unified():
        (ROOT / "cgroup.subtree_control").write_text(UNIFIED_CONTROLLERS)
    for hierarchy in _hierarchies():
        group = hierarchy / name
        group.mkdir(exist_ok=True)
        for file in INHERITED:
            if (group / file).exists() and not _is_unified():
                (group / file).write_text((hierarchy / file).read_text())
        for file, value in SHARES.items():
            if (group / file).exists():
                (group / file).write_text(value)


def processes(name: str) -> set[int]:
    """Return the ids of all processes in the cgroup ``name`` and below it."""
    pids: set[int] = set()
    for hierarchy in _hierarchies():
        for file in (hierarchy / name).rglob("cgroup.procs"):
            with contextlib.suppress(OSError):
                pids.update(int(line) for line in file.read_text().split())
    return pids - {0}


def remove(name: str, *, seconds: float = 5) -> None:
    """Delete the cgroup ``name`` and those below it; their processes must have ended.

    Raises ClusterError if one stays busy.
    """
    end = time.monotonic() + seconds
    while left := [path for path in _groups(name) if not _removed(path)]:
        if time.monotonic() > end:
            raise ClusterError(f"cgroup {left[0]} is still in use")
        time.sleep(0.05)  # the kernel releases a dead process a moment later


def _groups(name: str) -> list[Path]:
    """Return the cgroup's folders, deepest first."""
    groups: list[Path] = []
    for hierarchy in _hierarchies():
        for folder, _, _ in os.walk(hierarchy / name, topdown=False):
            groups.append(Path(folder))
    return groups


def _removed(group: Path) -> bool:
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _is_unified() -> bool:
    """Return whether the machine has cgroups of version 2 only."""
    return (ROOT / "cgroup.controllers").exists()


def _hierarchies() -> list[Path]:
    """Return the mounted hierarchies: one of version 2, or one for each controller of version 1."""
    if _is_unified():
        return [ROOT]
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    # a hybrid machine also has a hierarchy of version 2 without controllers, which runc uses too
    return [Path(mount[1]) for mount in mounts if mount[2] in ("cgroup", "cgroup2")]
