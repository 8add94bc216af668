"""Runs a contender in a process of its own: its memory and its compiled code end with it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu.setting import Depth
from benchmarks.peers import ROOT


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


def ask(request: Request, timeout: float) -> list[dict[str, Any]]:
    """Return what the process measured, one result per depth.

    A result with ``error`` stands for what could not be measured: a package that is not installed, memory
    that ran out, or a process that took longer than ``timeout`` seconds or failed.
    """
    values = {**vars(request), **request.size}
    del values["size"]
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.worker", json.dumps(values)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        timer = threading.Timer(timeout, process.kill)
        timer.start()
        try:
            output, errors = process.communicate()
        finally:
            timer.cancel()
            process.kill()
    results = [json.loads(line) for line in output.splitlines()]
    for depth in request.depths[len(results) :]:
        last = errors.strip().splitlines()[-1:] or [f"ended with code {process.returncode}"]
        reason = "took too long" if process.returncode == -9 else last[0]
        results.append({"depth": depth, "error": reason[:200]})
    return results
