"""The evaluation uses the whole validation set, logs what it skipped, or fails the run."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cluster.free_ports import free_port
from tests.trainer import ranks
from tests.trainer.small_runs import (
    ENCODED_RUN,
    NUM_SAMPLES,
    SHARD_SIZE,
    merge_all,
    mlperf_events,
    write_encoded,
)

from fluxtrain.contract.launch import RunPaths
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.safetensors_file import read_header

NAN = b"\xff" * 4
OPEN = {"logging": {"mlperf": {"division": "open"}}}


def run(paths: RunPaths, size: int, *changes: dict[str, Any]) -> list[int | None]:
    config = resolve(merge_all(ENCODED_RUN, *changes))
    return ranks.finish(partial(ranks.train_together, port=free_port()), config, paths, size)


def damage(root: Path, indices: list[int], field: str = "mean") -> None:
    for index in indices:
        path = root / "validation" / f"shard_{index // SHARD_SIZE:06d}.safetensors"
        span = read_header(path)[field]
        with path.open("r+b") as file:
            file.seek(span.offset + index % SHARD_SIZE * span.row_bytes)
            file.write(NAN)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    write_encoded(tmp_path)
    return RunPaths(tmp_path / "output", tmp_path, tmp_path)


def values(paths: RunPaths, key: str) -> list[Any]:
    return [event["value"] for event in mlperf_events(paths) if event["key"] == key]


def evaluations(paths: RunPaths) -> list[dict[str, Any]]:
    lines = (paths.output / "metrics.jsonl").read_text().splitlines()
    return [record for line in lines if "eval_loss" in (record := json.loads(line))]


def assert_no_result(paths: RunPaths) -> None:
    assert values(paths, "eval_accuracy") == []
    assert values(paths, "run_stop") == []
    assert evaluations(paths) == []


TWO_TIMESTEPS = [i for i in range(NUM_SAMPLES) if i % 8 in (0, 7)]  # all of t = 0 and t = 7/8
