"""Runs a contender in a process of its own: its memory and its compiled code end with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.gpu.setting import Depth
from benchmarks.peers import ROOT


@dataclass(frozen=True)
class Task:
    """What one part measures, and until when."""

    size: dict[str, Any]
    """Arguments of `make_setting`."""
    depths: tuple[Depth, ...]
    """Those of the contenders; the first is compared."""
    end: float
    """On the clock of `monotonic`; no process goes on after it."""
    output: Path

    @property
    def left(self) -> float:
        """Return the seconds until the end, at least one."""
        return max(1.0, self.end - monotonic())

    @property
    def errors(self) -> Path:
        """Return the file to which the processes' standard error is appended."""
        return self.output / "errors.log"


@dataclass(frozen=True)
class Request:
    """What a process measures."""

    contender: str
    depths: tuple[Depth, ...]
    size: dict[str, Any]
    """Arguments of `make_setting`."""
    warmup: int
    steps: int
    overrides: dict[str, Any] = field(default_factory=dict)
    attention: str = "auto"
    profile: str | None = None
    """Folder for a profile of a few steps after the others."""


def ask(request: Request, timeout: float, errors: Path) -> list[dict[str, Any]]:
    """Return what the process measured, one result per depth; append its standard error to ``errors``.

    A result with ``error`` stands for what could not be measured: a package that is not installed, memory
    that ran out, or a process that took longer than ``timeout`` seconds, with which all that it has started
    ends, or failed.
    """
    values = {**vars(request), **request.size}
    del values["size"]
    text = json.dumps(values)
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.worker", text]
    with errors.open("a+") as log:
        print(f"== {text}", file=log, flush=True)
        begin = log.tell()
        output, code = _output(command, timeout, log.fileno())
        log.seek(begin)
        last = log.read().strip().splitlines()[-1:] or [f"ended with code {code}"]
    results = [json.loads(line) for line in output.splitlines()]
    reason = f"took longer than {timeout:.0f} s" if code is None else last[0]
    missing = request.depths[len(results) :]
    return results + [{"depth": depth, "error": reason[:200]} for depth in missing]


def _output(command: list[str], timeout: float, errors: int) -> tuple[str, int | None]:
    """Return the standard output of ``command``, and its exit code, None if it took too long."""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            return process.communicate(timeout=timeout)[0], process.returncode
        except subprocess.TimeoutExpired:
            _kill(process.pid)
            return process.communicate()[0], None
        finally:
            _kill(process.pid)


def _kill(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
