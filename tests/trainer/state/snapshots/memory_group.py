"""A memory cgroup with a limit, of version 1 or 2, for processes of a test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryGroup:
    """A cgroup that exists."""

    folder: Path
    usage_file: str
    events_file: str

    def add(self, pid: int) -> None:
        """Move the process into the group: what it allocates from now on counts there."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    @property
    def usage(self) -> int:
        """Return the bytes that are charged."""
        return int((self.folder / self.usage_file).read_text())

    @property
    def kills(self) -> int:
        """Return how many processes the kernel has killed for the memory."""
        lines = (line.split() for line in (self.folder / self.events_file).read_text().splitlines())
        return next(int(value) for key, value in lines if key == "oom_kill")


@contextmanager
def memory_group(limit: int) -> Iterator[MemoryGroup]:
    """Create a group of at most ``limit`` bytes; the test is skipped where none can be created."""
    is_v1 = (_V1 / "memory.limit_in_bytes").exists()
    folder = (_V1 if is_v1 else _V2) / f"fluxtrain-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be created: {error}")
    try:
        try:
            (folder / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(limit))
        except OSError as error:
            pytest.skip(f"no memory cgroup can be limited: {error}")
        if is_v1:
            yield MemoryGroup(folder, "memory.usage_in_bytes", "memory.oom_control")
        else:
            with suppress(OSError):  # a kernel without swap has no such file
                (folder / "memory.swap.max").write_text("0")
            yield MemoryGroup(folder, "memory.current", "memory.events")
    finally:
        with suppress(OSError):  # the last process is still leaving
            folder.rmdir()
