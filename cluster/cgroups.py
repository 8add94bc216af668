"""A cgroup for each node, in every controller: the kubelet accounts its pods below it."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from cluster.errors import ClusterError

ROOT = Path("/sys/fs/cgroup")
UNIFIED_CONTROLLERS = "+cpuset +cpu +io +memory +pids"
INHERITED = ("cpuset.cpus", "cpuset.mems")
"""Empty in a new cgroup of version 1, which then takes no process."""


def create(name: str) -> None:
    """Make the cgroup ``name``, under version 1 or 2, whichever the machine has."""
    if _is_unified():
        (ROOT / "cgroup.subtree_control").write_text(UNIFIED_CONTROLLERS)
    for hierarchy in _hierarchies():
        group = hierarchy / name
        group.mkdir(exist_ok=True)
        for file in INHERITED:
            if (group / file).exists() and not _is_unified():
                (group / file).write_text((hierarchy / file).read_text())


def processes(name: str) -> set[int]:
    """Return the ids of all processes in the cgroup ``name`` and below it."""
    found: set[int] = set()
    for hierarchy in _hierarchies():
        for file in (hierarchy / name).rglob("cgroup.procs"):
            with contextlib.suppress(OSError):
                found.update(int(line) for line in file.read_text().split())
    return found - {0}


def remove(name: str, *, seconds: float = 5) -> None:
    """Delete the cgroup ``name`` and those below it; their processes are dead already.

    Raises ClusterError where one stays busy.
    """
    end = time.monotonic() + seconds
    while left := [path for path in _groups(name) if not _removed(path)]:
        if time.monotonic() > end:
            raise ClusterError(f"cgroup {left[0]} is still in use")
        time.sleep(0.05)  # the kernel lets go of a dead process a moment later


def _groups(name: str) -> list[Path]:
    """Return the cgroup's folders, deepest first."""
    found: list[Path] = []
    for hierarchy in _hierarchies():
        for folder, _, _ in os.walk(hierarchy / name, topdown=False):
            found.append(Path(folder))
    return found


def _removed(group: Path) -> bool:
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _is_unified() -> bool:
    """Tell whether the machine has cgroups of version 2 only."""
    return (ROOT / "cgroup.controllers").exists()


def _hierarchies() -> list[Path]:
    """Return the mounted trees: one of version 2, or one for each controller of version 1."""
    if _is_unified():
        return [ROOT]
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    # A mixed machine also has a tree of version 2, without controllers; runc enters it all the same.
    return [Path(mount[1]) for mount in mounts if mount[2] in ("cgroup", "cgroup2")]
