"""In a memory cgroup with a limit: snapshots make room for other processes, and no process is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from tests.trainer import ranks
from tests.trainer.outputs import losses
from tests.trainer.state.snapshots.memory_group import MemoryGroup, memory_group

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.parallel.distributed import World
from fluxtrain.state.free_memory import SHARED_MEMORY
from fluxtrain.state.slots import read_copies

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SHARED_MEMORY.exists(), reason="there is no /dev/shm"),
]

MIB = 1 << 20
LIMIT = 1280 * MIB
LEFT = 96 * MIB
"""What the other process leaves free: less than the reserve of 256 MiB."""
RUN = {
    "preset": "micro",
    "model": {"hidden_size": 256, "num_heads": 4, "axes_dim": [16, 24, 24], "depth": 2},
    "schedule": {"steps": 1_000_000, "global_batch_size": 2},
    "checkpoint": {"every_steps": 0, "memory_every_steps": 2},
    "evaluation": {"every_samples": 0, "at_end": False},
    "logging": {"every_steps": 1, "metrics_port": 0},
}
TAKE_MEMORY = """
import os, sys, time
folder, size = sys.argv[1], int(sys.argv[2])
open(f"{folder}/cgroup.procs", "w").write(str(os.getpid()))
pieces = []
for _ in range(size >> 24):
    pieces.append(bytearray(b"x") * (1 << 24))
    time.sleep(0.02)  # 800 MB a second
print("taken", flush=True)
sys.stdin.read()
"""


def train_in(config: RunConfig, paths: RunPaths, world: World, *, group: MemoryGroup) -> None:
    group.add(os.getpid())
    ranks.train_alone(config, paths, world)


@contextmanager
def trainer_in(group: MemoryGroup, paths: RunPaths) -> Iterator[Callable[[], bool]]:
    """Train one rank in ``group`` until the end; yield whether it still runs."""
    (process,) = ranks.start(partial(train_in, group=group), resolve(RUN), paths)
    try:
        yield process.is_alive
    finally:
        process.kill()
        process.join()


@contextmanager
def memory_taken(group: MemoryGroup, size: int) -> Iterator[None]:
    """Let another process of ``group`` take ``size`` bytes until the end."""
    command = [sys.executable, "-c", TAKE_MEMORY, str(group.folder), str(size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"taken\n", "the kernel killed it"
        yield
        other.communicate()


@pytest.fixture
def volume() -> Iterator[Path]:
    with TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        yield Path(folder)


def newest(volume: Path) -> int:
    """Return the step of the newest snapshot, 0 if there is none."""
    return max((copy.step for copy in read_copies(volume, node=0)), default=0)


def images(volume: Path) -> int:
    """Return the bytes of all images."""
    return sum(path.stat().st_size for path in volume.glob("start_*/*.image"))


def test_snapshots_make_room_and_are_taken_again(tmp_path: Path, volume: Path) -> None:
    paths = RunPaths(tmp_path, tmp_path, tmp_path / "run", snapshots=volume)

    def wait_for(done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 600
        while not done():
            assert runs(), ranks.output_of(paths)
            assert time.monotonic() < deadline, ranks.output_of(paths)
            time.sleep(0.05)

    with memory_group(LIMIT) as group, trainer_in(group, paths) as runs:
        wait_for(lambda: newest(volume) >= 6)
        size = images(volume)
        assert size > LEFT + 16 * MIB, "both processes fit only without snapshots"
        with memory_taken(group, LIMIT - (group.usage - size) - LEFT):
            wait_for(lambda: not newest(volume))
            step = max(losses(paths.output))
            wait_for(lambda: max(losses(paths.output)) > step + 4)
            assert images(volume) == 0
            assert LIMIT - group.usage < 256 * MIB
            assert group.kills == 0
        wait_for(lambda: "taken again" in ranks.output_of(paths))
        assert newest(volume) > step
        assert group.kills == 0
    told = [line for line in ranks.output_of(paths).splitlines() if "snapshots in memory" in line]
    paused, again = told
    assert "snapshots in memory are paused" in paused
    assert "of the memory cgroup are free, the reserve is 0.27 GB" in paused
    assert "snapshots in memory are taken again" in again
