"""Make all ranks of this container print the stacks of their threads, one after the other.

Ranks are found in /proc: the command is started by ``kubectl exec`` and is related to none of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fluxtrain.contract.process import STACKS_SECONDS, STACKS_SIGNAL, RankProcess

RANK_MODULE = "fluxtrain.launch.rank"
"""Module that torchrun starts as a rank."""
_PROC = Path("/proc")


def ask_ranks(proc: Path = _PROC) -> Iterator[RankProcess]:
    """Ask each rank in ``proc`` for its stacks and yield it, in the order of ranks."""
    for rank, pid in sorted(_ranks(proc)):
        process = _ask(proc, rank, pid)
        if process is not None:
            yield process
            time.sleep(STACKS_SECONDS)


def _ask(proc: Path, rank: int, pid: int) -> RankProcess | None:
    """Send the signal to the process if it handles it; return None if it has ended."""
    with suppress(OSError, ValueError, IndexError):
        state = _after_name(proc / str(pid))[0]
        lines = (proc / str(pid) / "status").read_text(encoding="utf-8").splitlines()
        # a process without a handler of the signal would end
        mask = next(line.split()[1] for line in lines if line.startswith("SigCgt:"))
        asked, now = bool(int(mask, 16) & 1 << (STACKS_SIGNAL - 1)), time.time()
        if asked:
            os.kill(pid, STACKS_SIGNAL)
        return RankProcess(rank=rank, pid=pid, state=state, time=now, asked=asked)
    return None


def _ranks(proc: Path) -> Iterator[tuple[int, int]]:
    """Yield rank and process id of each trainer; not of the processes that a trainer has started."""
    found = {}
    for folder in proc.iterdir():
        if folder.name.isdecimal():
            with suppress(OSError, ValueError, KeyError):
                found[int(folder.name)] = _rank(folder), int(_after_name(folder)[1])
    for pid, (rank, parent) in found.items():
        if parent not in found:
            yield rank, pid


def _rank(folder: Path) -> int:
    """Return the rank of a trainer's process; KeyError for any other process."""
    command = (folder / "cmdline").read_bytes().split(b"\0")
    if RANK_MODULE.encode() not in command:
        raise KeyError(RANK_MODULE)
    variables = (folder / "environ").read_bytes().split(b"\0")
    environment = dict(variable.partition(b"=")[::2] for variable in variables)
    return int(environment[b"RANK"])


def _after_name(folder: Path) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; the name before may contain anything."""
    return (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
