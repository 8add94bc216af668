"""Processes that look like ranks to ``fluxtrain stacks``, without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from fluxtrain.launch.stacks import RANK_MODULE

_HANDLER = "import faulthandler, signal; faulthandler.register(signal.SIGUSR2); "
_SLEEP = """
import os, time
def waits_in_{name}():
    os.write(1, b"ready\\n")
    time.sleep(60)
waits_in_{name}()
"""
_CHILD = "import os; os.fork(); "


@contextmanager
def rank_process(
    rank: int,
    *,
    name: str = "step",
    handler: bool = True,
    child: bool = False,
    stderr: IO[bytes] | int = subprocess.DEVNULL,
) -> Iterator[int]:
    """Start a process of ``rank`` that waits in a function of ``name``; yield its id."""
    code = (_HANDLER if handler else "") + (_CHILD if child else "") + _SLEEP.format(name=name)
    process = subprocess.Popen(
        [sys.executable, "-c", code, RANK_MODULE],
        env={**os.environ, "RANK": str(rank)},
        stdout=subprocess.PIPE,
        stderr=stderr,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        for _ in range(2 if child else 1):
            assert process.stdout.readline() == b"ready\n"
        yield process.pid
    finally:
        os.killpg(process.pid, 9)
        process.wait()
        process.stdout.close()


def proc_with(folder: Path, *pids: int) -> Path:
    """Return a folder like /proc with these processes only."""
    proc = folder / "proc"
    proc.mkdir()
    for pid in pids:
        (proc / str(pid)).symlink_to(f"/proc/{pid}")
    (proc / "meminfo").touch()
    return proc
