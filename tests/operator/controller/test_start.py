"""The start of the operator process."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from kubernetes.aio.config import kube_config
from tests.first_process import catches, first_process

from fluxtrain_operator.__main__ import main

START_SECONDS = 20
COMMAND = [sys.executable, "-m", "fluxtrain_operator", "--image=example.org/trainer:1"]
SLOW = "open('{fifo}').read()\n"
"""A module whose import never ends."""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be a first process")
def test_the_first_process_of_a_container_handles_sigterm_during_its_imports(
    tmp_path: Path,
) -> None:
    """Otherwise a pod that is deleted while it starts remains for its whole grace period."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "kopf.py").write_text(SLOW.format(fifo=tmp_path / "fifo"))
    with first_process(COMMAND, {"PYTHONPATH": str(tmp_path)}) as (process, pid):
        deadline = time.monotonic() + START_SECONDS
        while not catches(pid, signal.SIGTERM) and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(pid, signal.SIGTERM)
        assert process.wait(timeout=START_SECONDS) == 0


def test_missing_cluster_credentials_are_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "missing"))
    monkeypatch.setattr(sys, "argv", [*COMMAND[2:], "--address=127.0.0.1", "--port=0"])
    monkeypatch.setattr(sys, "setrecursionlimit", lambda limit: None)
    assert main() == 2
    record = caplog.records[-1]
    assert record.getMessage().startswith("no cluster credentials")
    assert record.exc_info is None
