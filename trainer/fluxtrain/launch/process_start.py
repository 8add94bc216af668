"""The time at which this process began: the start of MLPerf's initialisation, before anything is imported."""

from __future__ import annotations

import os
import time
from pathlib import Path

_START_FIELD = 19
"""Index of the start, in clock ticks since boot, in /proc/PID/stat after the name of the process."""


def process_start(root: Path = Path("/proc")) -> float:
    """Return the Unix time at which this process began, by its kernel; the present time without /proc."""
    now = time.time()
    try:
        fields = (root / "self/stat").read_text().rpartition(")")[2].split()
        ticks, uptime = int(fields[_START_FIELD]), float((root / "uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return now
    age = uptime - ticks / os.sysconf("SC_CLK_TCK")
    return now - max(0.0, age)
