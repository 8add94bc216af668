"""Short trainings that log to the sinks, one of which crashes and goes on."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from cluster.free_ports import free_port
from tests.trainer import ranks

from fluxtrain.contract.process import METRICS_FILE, RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.parallel.distributed import World
from fluxtrain.report.records import Record, read_records
from fluxtrain.report.sinks import scalars

BATCH, CRASH_STEP = 16, 11
RUN: dict[str, Any] = {
    "preset": "micro",
    "schedule": {"steps": 20, "global_batch_size": BATCH},
    "evaluation": {"every_samples": 5 * BATCH, "at_start": True},
    "checkpoint": {"every_steps": 8, "asynchronous": False, "memory_every_steps": 0},
    "logging": {"every_steps": 1, "metrics_port": 0},
}


def train(
    output: Path, logging: dict[str, Any], crash: int = 0, size: int = 1, **changes: Any
) -> None:
    """Train on ``size`` ranks, to the end or until all crash after step ``crash``."""
    config = resolve(merge(merge(RUN, {"logging": logging}), changes))
    paths = RunPaths(output, output, output)
    run = partial(train_and_crash, port=free_port(), crash=crash)
    codes = [ranks.CRASHED if crash else 0] * size
    assert ranks.finish(run, config, paths, size) == codes, ranks.output_of(paths)


def train_and_crash(
    config: RunConfig, paths: RunPaths, world: World, *, port: int, crash: int
) -> None:
    if crash:
        ranks.crash_after(crash)
    ranks.train_together(config, paths, world, port=port)


def records(output: Path) -> list[Record]:
    return read_records(output / METRICS_FILE)


def points(output: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the points of each number of metrics.jsonl, on the axis of training samples."""
    found = dict[str, list[tuple[int, float]]]()
    for record in records(output):
        for name, value in scalars(record).items():
            found.setdefault(name, []).append((record["samples"], value))
    return found
