"""The process of this rank in a trial: started, watched, and killed with what it holds of the GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

from fluxtrain.benchmark.trial import EXIT_OUT_OF_MEMORY
from fluxtrain.contract.launch import (
    ENV_FATAL_ERROR,
    ENV_NODE_PROGRESS,
    ENV_OUTPUT,
    ENV_SNAPSHOTS,
    ENV_TERMINATION_MESSAGE,
)
from fluxtrain.contract.progress import IMPORT
from fluxtrain.errors import EXIT_OK
from fluxtrain.report.endpoint import Endpoint
from fluxtrain.report.node_progress import read_ranks

_OF_THE_AGENT = ("TORCHELASTIC_ERROR_FILE", ENV_FATAL_ERROR, ENV_TERMINATION_MESSAGE, ENV_SNAPSHOTS)
"""Files by which a rank tells its agent about itself; the processes of trials have none."""
_OWN_STORE = {"TORCHELASTIC_USE_AGENT_STORE": "False"}
"""Torch's variable: rank 0 of the trial opens a store for its process group."""
_LOG_BYTES = 1 << 16


class Status(IntEnum):
    """How the process of a rank is; the higher of two ranks is that of both."""

    DONE = 0
    RUNNING = 1
    FAILED = 2
    OUT_OF_MEMORY = 3


class TrialProcess:
    """A process that takes training steps as one rank of a process group of its own."""

    def __init__(
        self,
        order: Mapping[str, Any],
        variables: Mapping[str, str],
        folder: Path,
        endpoint: Endpoint,
    ) -> None:
        """Start it with ``order`` on stdin; it writes to ``folder``. What it gets done is progress here."""
        self._endpoint = endpoint
        endpoint.set_phase(IMPORT)
        self._progress = tempfile.TemporaryDirectory()
        self._progressed = 0.0
        self._log = folder / f"rank_{variables['RANK']}.log"
        self._deadline = time.monotonic() + float(order["seconds"])
        self._is_late = False
        environment = {k: v for k, v in os.environ.items() if k not in _OF_THE_AGENT}
        environment |= {**_OWN_STORE, **variables, ENV_OUTPUT: str(folder)}
        environment[ENV_NODE_PROGRESS] = self._progress.name
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fluxtrain.benchmark.trial"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write(json.dumps(order).encode())

    def status(self) -> Status:
        """Return how it is at present, and report its progress."""
        self._report()
        code = self._process.poll()
        if code is None:
            self._is_late = time.monotonic() > self._deadline
            return Status.FAILED if self._is_late else Status.RUNNING
        if code == EXIT_OK:
            return Status.DONE
        # the kernel kills a process with SIGKILL if the machine's memory is short
        is_out = code in (EXIT_OUT_OF_MEMORY, -9)
        return Status.OUT_OF_MEMORY if is_out else Status.FAILED

    def end(self) -> None:
        """Kill it if it runs, and wait until it is gone, and its memory with it."""
        self._process.kill()
        self._process.wait()
        self._progress.cleanup()

    def reason(self) -> str:
        """Return why it failed: the last line of its log."""
        if self._is_late:
            return "it took longer than benchmark.trial_seconds"
        with self._log.open("rb") as log:
            log.seek(max(0, self._log.stat().st_size - _LOG_BYTES))
            lines = log.read().decode(errors="replace").strip().splitlines()
        return f"{lines[-1] if lines else 'it printed nothing'} ({self._log})"

    def _report(self) -> None:
        for rank in read_ranks({ENV_NODE_PROGRESS: self._progress.name}):
            if rank.progressed > self._progressed:
                self._progressed = rank.progressed
                self._endpoint.set_phase(rank.phase)
                self._endpoint.alive()
