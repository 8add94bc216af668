"""A run that is asked to stop before its launcher exists: the exit code of a stopped run."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from fluxtrain.errors import EXIT_STOPPED

STOP = """
import os, signal
from fluxtrain import cli
cli._parser = lambda: os.kill(os.getpid(), signal.SIGTERM)
cli.main(["{}"])
"""


@pytest.mark.parametrize(("command", "code"), [("run", EXIT_STOPPED), ("plan", -signal.SIGTERM)])
def test_sigterm_before_anything_is_loaded(command: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", STOP.format(command)], timeout=60, check=False)
    assert done.returncode == code
