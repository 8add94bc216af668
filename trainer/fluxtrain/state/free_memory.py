"""Memory of this process's volume, machine and cgroups (v1 and v2): what is free, and kills for it."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

SHARED_MEMORY = Path("/dev/shm")
"""Linux's file system in memory, which data loaders use too."""
IMAGE, RECORD = ".image", ".json"
"""Suffixes of a snapshot's image and of the record that makes it valid."""
_RESERVE_PART = 16
_MIN_RESERVE, _MAX_RESERVE = 256 << 20, 8 << 30
_MAX_RESERVE_PART = 4


@dataclass(frozen=True)
class Bound:
    """A limit of memory, and what is left below it."""

    name: str
    limit: int
    """Bytes."""
    free: int
    """Bytes that can still be written; the kernel drops page cache for them."""
    reserve: int
    """Bytes that snapshots leave free."""

    @property
    def spare(self) -> int:
        """Return the bytes that are left above the reserve; negative if there is less than the reserve."""
        return self.free - self.reserve

    @property
    def room(self) -> int:
        """Return the bytes that new snapshots may take: a second reserve is left for what grows later."""
        return self.spare - self.reserve

    def __str__(self) -> str:
        free, limit, reserve = (n / 1e9 for n in (self.free, self.limit, self.reserve))
        return (
            f"{free:.2f} of {limit:.2f} GB of {self.name} are free, the reserve is {reserve:.2f} GB"
        )


def reserve_of(limit: int) -> int:
    """Return the reserve of a limit: a sixteenth, from 256 MiB (but no more than a quarter) to 8 GiB."""
    least = min(_MIN_RESERVE, limit // _MAX_RESERVE_PART)
    return min(max(limit // _RESERVE_PART, least), _MAX_RESERVE)


@dataclass(frozen=True)
class _Files:
    """The files of a cgroup version."""

    limit: str
    usage: str
    reclaimable: tuple[str, ...]
    """Keys in memory.stat of what the kernel frees before it kills; memory of tmpfs is not part of it."""
    unwritten: tuple[str, ...]
    """Keys of the page cache that must be written to storage before it can be freed."""
    events: str
    """File with the number of processes that were killed for the memory."""


_V2 = _Files(
    "memory.max",
    "memory.current",
    ("inactive_file", "active_file", "slab_reclaimable"),
    ("file_dirty", "file_writeback"),
    "memory.events",
)
_V1 = _Files(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
    ("total_dirty", "total_writeback"),
    "memory.oom_control",
)


def require_room(volume: Path, needed: int) -> None:
    """Raise OSError if ``needed`` bytes are more than new snapshots in ``volume`` may take."""
    bound = min(bounds(volume), key=lambda bound: bound.room)
    if needed > bound.room:
        text = f"a node needs {needed / 1e9:.2f} GB beside twice the reserve; {bound}"
        raise OSError(errno.ENOMEM, text)


def require_spare(volume: Path, needed: int) -> None:
    """Raise OSError if ``needed`` more bytes in ``volume`` would touch a reserve."""
    bound = tightest(volume)
    if needed > bound.spare:
        raise OSError(errno.ENOMEM, str(bound))


def tightest(volume: Path) -> Bound:
    """Return the bound above whose reserve the least is left."""
    return min(bounds(volume), key=lambda bound: bound.spare)


def bounds(volume: Path, root: Path = Path("/")) -> Iterator[Bound]:
    """Yield what bounds the bytes in ``volume``, which is in memory: itself, the machine and cgroups."""
    yield _of_volume(volume)
    yield from _of_system(root)


def free_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that the machine and the cgroups of this process leave for new memory."""
    return min(bound.free for bound in _of_system(root))


def memory_limit(root: Path = Path("/")) -> int:
    """Return the bytes of the machine, or of the smallest limit of this process's cgroups."""
    return min(bound.limit for bound in _of_system(root))


def _of_system(root: Path) -> Iterator[Bound]:
    with suppress(OSError, ValueError, LookupError):
        values = _values(root / "proc/meminfo")
        total, available = (1024 * values[key] for key in ("MemTotal:", "MemAvailable:"))
        yield Bound("the machine", total, available, reserve_of(total))
    for folder, files in _cgroups(root):
        yield from _of_cgroup(folder, files)


def out_of_memory_kills(root: Path = Path("/")) -> Iterator[int]:
    """Yield how many processes of each of its cgroups that can be seen the kernel killed for the memory."""
    for folder, files in _cgroups(root):
        with suppress(OSError, ValueError, LookupError):
            yield _values(folder / files.events)["oom_kill"]


def _of_volume(volume: Path) -> Bound:
    """Return the bound by the size of ``volume``: with a reserve if data loaders use it too."""
    status = os.statvfs(volume)
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    is_shared = SHARED_MEMORY.exists() and SHARED_MEMORY.stat().st_dev == volume.stat().st_dev
    return Bound(str(volume), size, free, reserve_of(size) if is_shared else 0)


def _of_cgroup(folder: Path, files: _Files) -> Iterator[Bound]:
    """Yield the bound by the limit of a cgroup; nothing if it has none or does not exist here."""
    with suppress(OSError, ValueError, LookupError):
        limit = int((folder / files.limit).read_text(encoding="utf-8"))  # "max" is no number
        used = int((folder / files.usage).read_text(encoding="utf-8"))
        stat = _values(folder / "memory.stat")
        reclaimable = sum(stat.get(key, 0) for key in files.reclaimable)
        unwritten = sum(stat.get(key, 0) for key in files.unwritten)
        free = max(0, limit - used + max(0, reclaimable - unwritten))
        yield Bound("the memory cgroup", limit, free, reserve_of(limit))


def _cgroups(root: Path) -> Iterator[tuple[Path, _Files]]:
    """Yield the memory cgroups of this process that can be seen, its own and those around it."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
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


def _values(path: Path) -> dict[str, int]:
    """Return the numbers after the keys in a file of lines of keys and numbers."""
    lines = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
    return {words[0]: int(words[1]) for words in lines}


_FASTEST_GROWTH = 8e9
"""Bytes per second: memory that grows no faster is noticed before it touches the reserve."""
_SHORTEST, _LONGEST = 0.05, 1.0
"""Seconds between two looks."""
_NOTHING_LEFT = 0.25
"""Seconds to the next look if memory is short and there is nothing to free."""


class MemoryWatch:
    """Calls a function at each look that finds less memory than is to be left free."""

    def __init__(
        self, volume: Path, on_short: Callable[[Bound], bool], reserve_part: float = 1.0
    ) -> None:
        """Watch what bounds ``volume``; ``reserve_part`` of each reserve is to be left free.

        ``on_short`` returns whether it has freed something.
        """
        self._volume, self._on_short, self._part = volume, on_short, reserve_part
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def look(self) -> float:
        """Call the function if memory is short; return the seconds until the next look."""
        with suppress(OSError):  # the volume is gone at the end of a run
            bound = tightest(self._volume)
            left = bound.free - self._part * bound.reserve
            if left < 0:
                return _SHORTEST if self._on_short(bound) else _NOTHING_LEFT
            return min(max(left / _FASTEST_GROWTH, _SHORTEST), _LONGEST)
        return _LONGEST

    def _run(self) -> None:
        seconds = 0.0
        while not self._ended.wait(seconds):
            seconds = self.look()
