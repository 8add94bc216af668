"""What a run wrote to its output folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def records(output: Path) -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl."""
    return _read(output / "metrics.jsonl")


def losses(output: Path, key: str = "train_loss") -> dict[int, float]:
    """Return the loss ``key`` of each step that has one; no step may be recorded twice."""
    found = [(record["step"], record[key]) for record in records(output) if key in record]
    assert len(dict(found)) == len(found), found
    return dict(found)


def newest_step(output: Path) -> int:
    """Return the newest step of a run that may be writing it; 0 if there is none."""
    try:
        return max(losses(output), default=0)
    except (OSError, ValueError):
        return 0


def ledger(output: Path) -> dict[int, list[int]]:
    """Return the samples of each step, sorted, over all ranks."""
    used: dict[int, list[int]] = {}
    for path in (output / "ledger").glob("rank_*.jsonl"):
        for record in _read(path):
            used.setdefault(record["step"], []).extend(record["indices"])
    return {step: sorted(indices) for step, indices in sorted(used.items())}


def mlperf_events(output: Path) -> list[dict[str, Any]]:
    return _read(output / "mlperf.log")


def mlperf_values(output: Path, key: str) -> list[Any]:
    """Return the values of the events ``key``."""
    return [event["value"] for event in mlperf_events(output) if event["key"] == key]


def resumed_steps(output: Path, batch: int = 16) -> list[int]:
    """Return the step after which each restart continued, with batches of ``batch`` samples."""
    resumes = (event for event in mlperf_events(output) if event["key"] == "run_resumed")
    return [event["metadata"]["samples_count"] // batch for event in resumes]


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in path.read_text().splitlines()]
