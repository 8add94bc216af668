"""Faults of processes: killed, frozen, out of memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cluster.kubectl import Manifest
from tests.end_to_end.stage import wait_for
from tests.faults.target import Target

RANK, AGENT, RENDEZVOUS = (
    "fluxtrain.launch.rank",
    "fluxtrain.cli\0agent",
    "fluxtrain.cli\0rendezvous",
)
MEMORY_CGROUPS = Path("/sys/fs/cgroup/memory")
HEADROOM_BYTES = 32 << 20
KILL_SECONDS = 60.0
HOG = """
import os, sys
open(sys.argv[1], "w").write(str(os.getpid()))
blocks = []
while os.path.exists("/proc/" + sys.argv[2] + "/exe"):
    blocks.append(b"x" * (8 << 20))
"""
"""Joins a cgroup and allocates memory until a process has ended."""


def pids(pod: Manifest, program: str) -> list[int]:
    """Return the processes of ``pod`` whose command line contains ``program``, oldest first."""
    uid, found = pod["metadata"]["uid"], []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            in_pod = uid in (folder / "cgroup").read_text()
            if in_pod and program in (folder / "cmdline").read_text():
                found.append(int(folder.name))
    return sorted(found)


@contextmanager
def rank_killed(target: Target) -> Iterator[None]:
    os.kill(pids(target.pod_of_rank(1), RANK)[0], signal.SIGKILL)
    yield


@contextmanager
def rank_frozen(target: Target) -> Iterator[None]:
    with _frozen(target, 1):
        yield


@contextmanager
def only_rank_frozen(target: Target) -> Iterator[None]:
    """Freeze rank 0 of a job of one node: no trainer answers."""
    with _frozen(target, 0):
        yield


@contextmanager
def _frozen(target: Target, rank: int) -> Iterator[None]:
    (pid,) = pids(target.pod_of_rank(rank), RANK)
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until_ended(target, pid)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def wait_until_ended(target: Target, pid: int) -> None:
    """Wait until the operator has restarted the process ``pid``."""
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), target.debug_text, seconds=120)


@contextmanager
def agent_killed(target: Target) -> Iterator[None]:
    os.kill(pids(target.pod_of_rank(1), AGENT)[0], signal.SIGKILL)
    yield


@contextmanager
def rank_out_of_memory(target: Target) -> Iterator[None]:
    kill_for_memory(pids(target.pod_of_rank(1), RANK)[0])
    yield


@contextmanager
def container_out_of_memory(target: Target) -> Iterator[None]:
    """Let the kernel kill process 1, and with it the container."""
    kill_for_memory(pids(target.pod_of_rank(1), AGENT)[0])
    yield


def kill_for_memory(pid: int) -> None:
    """Fill the memory of a container, limited to little more than it uses, until the kernel kills ``pid``.

    That process is made the preferred victim, and no other.
    """
    group = _memory_cgroup(pid)
    for other in (group / "cgroup.procs").read_text().split():
        with suppress(OSError):  # it has ended
            Path(f"/proc/{other}/oom_score_adj").write_text("0")
    limit, used = group / "memory.limit_in_bytes", group / "memory.usage_in_bytes"
    Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
    limit.write_text(str(int(used.read_text()) + HEADROOM_BYTES))
    hog = subprocess.Popen([sys.executable, "-c", HOG, str(group / "cgroup.procs"), str(pid)])
    try:
        killed = Path(f"/proc/{pid}/exe")
        wait_for(lambda: not killed.exists(), "the kernel kills it", seconds=KILL_SECONDS)
    finally:
        hog.kill()
        hog.wait()
        with suppress(OSError):  # the container is gone
            limit.write_text("-1")


def _memory_cgroup(pid: int) -> Path:
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    (line,) = [line for line in lines if ":memory:" in line]
    return MEMORY_CGROUPS / line.split(":", 2)[2].lstrip("/")
