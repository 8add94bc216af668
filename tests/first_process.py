"""Runs programs as process 1 of a PID namespace, where the kernel ignores signals without a handler."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def first_process(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run ``command`` as process 1; yield a process that ends with its exit code, and its process id."""
    unshare = ["unshare", "--pid", "--fork", "--kill-child"]
    outer = subprocess.Popen([*unshare, *command], env={**os.environ, **(environment or {})})
    try:
        yield outer, _first_child(outer.pid)
    finally:
        outer.kill()
        outer.wait()


def catches(pid: int, signum: signal.Signals) -> bool:
    """Return whether process ``pid`` has a handler for ``signum``."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (mask,) = (int(line.split()[1], 16) for line in lines if line.startswith("SigCgt"))
    return bool(mask >> (signum - 1) & 1)


def _first_child(pid: int) -> int:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    while not (children := path.read_text().split()):
        time.sleep(0.1)
    return int(children[0])
