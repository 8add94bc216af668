"""Folders in memory; what is mounted below a folder, and how it comes off again."""

from __future__ import annotations

import re
from pathlib import Path

from cluster.commands import run
from cluster.errors import ClusterError
from cluster.packages import program


def in_memory(folder: Path) -> None:
    """Make ``folder`` a file system in memory: what is deleted soon need not reach a disk.

    Images and etcd's data are written at every start and deleted at every end. On a slow disk a start
    took 15 s and an end 37 s; with them in memory, 10 s and half a second.
    """
    folder.mkdir(parents=True, exist_ok=True)
    run([program("mount"), "-t", "tmpfs", "-o", "mode=0700", "fluxtrain", folder])


def below(folder: Path) -> list[str]:
    """Return the mount points at ``folder`` and below it, the newest first."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [_decoded(line.split()[4]) for line in lines]
    return [point for point in reversed(points) if f"{point}/".startswith(f"{folder}/")]


def unmount(folder: Path) -> None:
    """Take off everything at ``folder`` and below it.

    Raises ClusterError where something stays, for deleting the folder would then delete what is
    mounted there: a volume may be a folder of the person's own.
    """
    if points := below(folder):
        run([program("umount"), "--lazy", *points])
    if left := below(folder):
        raise ClusterError(f"{left[0]} stays mounted")


def _decoded(field: str) -> str:
    """Return a field of mountinfo with its octal escapes resolved."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)
