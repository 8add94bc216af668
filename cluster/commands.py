"""Run a program and return its output."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster.errors import ClusterError

Arguments = list[str | Path]

TAIL_LINES = 15


def run(
    argv: Sequence[str | Path],
    *,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    folder: Path | None = None,
    seconds: float | None = 120,
) -> str:
    """Return the standard output of ``argv``; ``env`` is added to the environment.

    Raises ClusterError with the last lines of its output if it fails.
    """
    try:
        done = subprocess.run(
            [str(part) for part in argv],
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            env={**os.environ, **(env or {})},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"{Path(argv[0]).name}: still running after {error.timeout} s") from None
    if done.returncode:
        tail = "\n".join((done.stderr or done.stdout).splitlines()[-TAIL_LINES:])
        command = " ".join(str(part) for part in argv[:4])
        raise ClusterError(f"{command} …: exit code {done.returncode}\n{tail}")
    return done.stdout
