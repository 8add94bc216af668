"""The command line ``fluxtrain`` as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys


def environment() -> dict[str, str]:
    """Return the environment of a process with one thread."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def command(*arguments: str) -> list[str]:
    """Return the command line ``fluxtrain ARGUMENTS``."""
    return [sys.executable, "-m", "fluxtrain.cli", *arguments]


def fluxtrain(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``fluxtrain ARGUMENTS`` to its end, whatever its exit code."""
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        env=environment(),
        timeout=300,
        check=False,
    )
