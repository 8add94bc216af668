"""Memory of this process's volume, machine and cgroups (v1 and v2): what is free, and kills for it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class _Files:
    """The files of a cgroup version."""

    limit: str
    usage: str
    inactive: str
    """Key in memory.stat of the page cache that the kernel frees first."""
    events: str
    """File with the number of processes that were killed for the memory."""


_V2 = _Files("memory.max", "memory.current", "inactive_file", "memory.events")
_V1 = _Files(
    "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control"
)


def require_free(volume: Path, needed: int) -> None:
    """Raise OSError if ``needed`` bytes are more than half of what can still be written to ``volume``."""
    free = free_memory(volume)
    if needed > free // 2:
        text = (
            f"a node needs {needed / 1e9:.1f} GB, and of {free / 1e9:.1f} GB free half may be used"
        )
        raise OSError(errno.ENOMEM, text)


def free_memory(volume: Path, root: Path = Path("/")) -> int:
    """Return the bytes that can be written to ``volume``, which is in memory, before a limit is reached."""
    status = os.statvfs(volume)
    free = [status.f_bavail * status.f_frsize, *_available(root / "proc/meminfo")]
    for folder, files in _cgroups(root):
        free += _below_limit(folder, files)
    return max(0, min(free))


def out_of_memory_kills(root: Path = Path("/")) -> Iterator[int]:
    """Yield how many processes of each of its cgroups that can be seen the kernel killed for the memory."""
    for folder, files in _cgroups(root):
        with suppress(OSError, ValueError):
            yield _value(folder / files.events, "oom_kill")


def _available(meminfo: Path) -> Iterator[int]:
    with suppress(OSError, ValueError):
        yield 1024 * _value(meminfo, "MemAvailable:")


def _cgroups(root: Path) -> Iterator[tuple[Path, _Files]]:
    """Yield the memory cgroups of this process that can be seen, its own and those around it."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                yield from _around(root / "sys/fs/cgroup", path, _V2)
            elif "memory" in controllers.split(","):
                yield from _around(root / "sys/fs/cgroup/memory", path, _V1)


def _around(mount: Path, path: str, files: _Files) -> Iterator[tuple[Path, _Files]]:
    relative = Path(path.lstrip("/"))
    if ".." in relative.parts:
        relative = Path()
    for folder in (relative, *relative.parents):
        yield mount / folder, files


def _below_limit(folder: Path, files: _Files) -> Iterator[int]:
    """Yield the bytes below the limit of a cgroup; nothing if it has none or does not exist here."""
    with suppress(OSError, ValueError):
        limit = int((folder / files.limit).read_text())  # "max" is no number
        used = int((folder / files.usage).read_text())
        yield limit - used + _value(folder / "memory.stat", files.inactive)


def _value(path: Path, key: str) -> int:
    """Return the number after ``key`` in a file of lines of keys and numbers."""
    for line in path.read_text().splitlines():
        name, value = line.split()[:2]
        if name == key:
            return int(value)
    raise ValueError(f"{path}: no {key}")
