"""The operator's process, from its first moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.first_process import catches, first_process

START_SECONDS = 20
COMMAND = [sys.executable, "-m", "fluxtrain_operator", "--image=example.org/trainer:1"]
SLOW = "open('{fifo}').read()\n"
"""A package that takes for ever to import."""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be a first process")
def test_the_first_process_of_a_container_heeds_a_stop_while_it_still_imports(
    tmp_path: Path,
) -> None:
    """Else a pod that is deleted as it starts stays for the whole of its grace."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "kopf.py").write_text(SLOW.format(fifo=tmp_path / "fifo"))
    with first_process(COMMAND, {"PYTHONPATH": str(tmp_path)}) as (process, pid):
        deadline = time.monotonic() + START_SECONDS
        while not catches(pid, signal.SIGTERM) and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(pid, signal.SIGTERM)
        assert process.wait(timeout=START_SECONDS) == 0


def test_without_a_cluster_it_says_so_in_one_line(tmp_path: Path) -> None:
    nowhere = {"KUBECONFIG": str(tmp_path / "nowhere"), "HOME": str(tmp_path)}
    argv = [*COMMAND, "--address=127.0.0.1", "--port=0"]
    done = subprocess.run(argv, env={**os.environ, **nowhere}, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no cluster to operate on" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
