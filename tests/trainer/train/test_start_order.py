"""The order of a start: MLPerf's clock before the first sample, all forks before the first step."""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cluster.free_ports import free_port
from tests.trainer import ranks
from tests.trainer.outputs import mlperf_events
from tests.trainer.small_runs import ENCODED_RUN, IMAGES, merge_all, write_encoded
from tests.trainer.tiny_encoders import write_encoders, write_images

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.images import TarImages
from fluxtrain.data.shard_dataset import ShardDataset
from fluxtrain.parallel.distributed import World, process_group
from fluxtrain.report.observer import Observer
from fluxtrain.train.loop import train

DELAY = 1.0


def train_with_a_late_rank(
    config: RunConfig, paths: RunPaths, world: World, *, port: int, late: int
) -> None:
    """Train; rank ``late`` is ready seconds after the other, and each records when it reads a sample."""
    ranks.set_environment(world, port)
    record_reads(ShardDataset, "read", paths.output / f"reads_{world.rank}.jsonl")
    record_reads(TarImages, "image", paths.output / f"reads_{world.rank}.jsonl")
    open_logs = Observer.open_logs

    def open_logs_late(self: Observer, *arguments: Any) -> None:
        open_logs(self, *arguments)
        time.sleep(DELAY * (world.rank == late))
        (paths.output / f"ready_{world.rank}.json").write_text(json.dumps(time.time()))

    Observer.open_logs = open_logs_late  # type: ignore[method-assign]
    with process_group() as joined:
        train(config, paths, joined)


def record_reads(kind: type, method: str, path: Path) -> None:
    """Let ``method`` append the time to ``path`` before it reads, also in loader processes."""
    read = getattr(kind, method)

    def recorded(*arguments: Any) -> Any:
        with path.open("a") as file:
            file.write(f"{time.time()}\n")
        return read(*arguments)

    setattr(kind, method, recorded)


@pytest.mark.parametrize(
    ("source", "late", "num_workers"),
    [("encoded", 0, 0), ("encoded", 0, 2), ("encoded", 1, 2), ("images", 0, 0), ("images", 0, 2)],
)
def test_no_sample_is_read_before_the_run_starts(
    tmp_path: Path, source: str, late: int, num_workers: int
) -> None:
    changes = {"data": {"num_workers": num_workers}, "evaluation": {"every_samples": 0}}
    config = resolve(merge_all(ENCODED_RUN, IMAGES if source == "images" else {}, changes))
    paths = RunPaths(tmp_path / "output", tmp_path, tmp_path)
    if source == "encoded":
        write_encoded(tmp_path)
    else:
        write_encoders(tmp_path)
        for part in ("train", "validation"):
            write_images(tmp_path / part, 24)
    run = partial(train_with_a_late_rank, port=free_port(), late=late)
    assert ranks.finish(run, config, paths, size=2) == [0, 0], ranks.output_of(paths)
    (started,) = [
        event["time_ms"] for event in mlperf_events(paths.output) if event["key"] == "run_start"
    ]
    for rank in range(2):
        ready = json.loads((paths.output / f"ready_{rank}.json").read_text())
        reads = (paths.output / f"reads_{rank}.jsonl").read_text().split()
        assert int(1000 * ready) <= started, f"rank {rank} was not ready when the clock started"
        assert min(map(float, reads)) * 1000 >= started, (
            f"rank {rank} read before the clock started"
        )


def train_recording_forks(config: RunConfig, paths: RunPaths, world: World) -> None:
    """Train; append the number of logged steps to a file at each fork of this process."""
    owner, log = os.getpid(), paths.output / "metrics.jsonl"

    def record() -> None:
        if os.getpid() == owner:
            logged = len(log.read_text().splitlines()) if log.exists() else 0
            with (paths.output / "forks").open("a") as file:
                file.write(f"{logged}\n")

    os.register_at_fork(before=record)
    ranks.train_alone(config, paths, world)


def test_loader_processes_start_before_the_first_step(tmp_path: Path) -> None:
    """A lock of libc that a checkpoint's thread holds at a fork stays locked in the new process."""
    write_encoded(tmp_path)
    changes = {
        "data": {"num_workers": 2},
        "evaluation": {"every_samples": 2 * ENCODED_RUN["schedule"]["global_batch_size"]},
        "checkpoint": {"every_steps": 1},
    }
    paths = RunPaths(tmp_path / "output", tmp_path, tmp_path)
    config = resolve(merge_all(ENCODED_RUN, changes))
    assert ranks.finish(train_recording_forks, config, paths) == [0], ranks.output_of(paths)
    assert (paths.output / "forks").read_text().split() == ["0"] * 4
