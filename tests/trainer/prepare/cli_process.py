"""Runs ``fluxtrain`` as a process, and kills it after a time or before a given step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_KILL_BEFORE = Path(__file__).with_name("kill_before.py")


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "fluxtrain.cli", *map(str, arguments)]


def require_success(*arguments: object, **environment: str) -> None:
    process = subprocess.run(
        command(*arguments), env=os.environ | environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr


def is_killed_after(seconds: float, *arguments: object) -> bool:
    """Run until the end or for ``seconds``; return whether the process was killed."""
    process = subprocess.Popen(command(*arguments), stderr=subprocess.PIPE)
    try:
        _, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()  # until its worker processes have ended too: they hold the same pipe
        return True
    assert process.returncode == 0, errors
    return False


def kill_before_each(steps: Sequence[tuple[str, str]], *arguments: object) -> None:
    """Run once for each step, an audit event and a fragment of its argument, and be killed before it."""
    for event, fragment in steps:
        program = [sys.executable, str(_KILL_BEFORE), event, fragment, *map(str, arguments)]
        process = subprocess.run(program, capture_output=True)
        assert process.returncode == -signal.SIGKILL, (event, fragment, process.stderr)
