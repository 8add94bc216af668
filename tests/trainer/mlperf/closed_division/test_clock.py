"""MLPerf's clock, and data sets in place of MLCommons'."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster.free_ports import free_port
from tests.paths import MICRO
from tests.trainer import ranks
from tests.trainer.commands import fluxtrain
from tests.trainer.outputs import mlperf_events, mlperf_values
from tests.trainer.small_runs import ENCODED_RUN, as_closed, merge_all, write_encoded

from fluxtrain.contract.process import ENV_FLUSHED, MLPERF_FILE, RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.presets import MLPERF_TRAINING_SET, MLPERF_VALIDATION_SET
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.sources import write_empty_text
from fluxtrain.errors import EXIT_USAGE
from fluxtrain.launch.environment import process_start
from fluxtrain.mlperf.evidence import read_run
from fluxtrain.mlperf.review.review import compliance_findings, rule_findings
from fluxtrain.parallel.distributed import World, process_group
from fluxtrain.report.observer import Observer
from fluxtrain.train.loop import train

DELAY = 1.0
EVENTS = ("open", "os.listdir", "os.scandir")


def train_with_a_late_rank(
    config: RunConfig, paths: RunPaths, world: World, *, port: int, late: int
) -> None:
    """Train; rank ``late`` is ready later, and each process records when it opens a data file."""
    ranks.set_environment(world, port)
    record_opens(paths.data, paths.output / f"opens_{world.rank}")
    open_logs = Observer.open_logs

    def open_logs_late(self: Observer, *arguments: Any) -> None:
        open_logs(self, *arguments)
        time.sleep(DELAY * (world.rank == late))
        (paths.output / f"ready_{world.rank}").write_text(str(time.time()))

    Observer.open_logs = open_logs_late  # type: ignore[method-assign]
    with process_group() as joined:
        train(config, paths, joined)


def record_opens(root: Path, log: Path) -> None:
    """Write the time of each file opened and folder listed below ``root``, in forks too."""
    file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and arguments and str(arguments[0]).startswith(str(root)):
            os.write(file, f"{time.time()}\n".encode())

    sys.addaudithook(hook)


def time_of(output: Path, key: str) -> int:
    (event,) = [event for event in mlperf_events(output) if event["key"] == key]
    return int(event["time_ms"])


@pytest.mark.parametrize(
    ("division", "late", "num_workers"), [("closed", 0, 2), ("closed", 1, 0), ("open", 1, 0)]
)
def test_no_data_file_is_opened_before_the_clock_starts(
    tmp_path: Path, division: str, late: int, num_workers: int
) -> None:
    config = resolve(merge_all(ENCODED_RUN, {"data": {"num_workers": num_workers}}))
    config = as_closed(config) if division == "closed" else config
    paths = RunPaths(tmp_path / "output", tmp_path / "data", tmp_path)
    write_encoded(paths.data)
    run = partial(train_with_a_late_rank, port=free_port(), late=late)
    assert ranks.finish(run, config, paths, size=2) == [0, 0], ranks.output_of(paths)
    started = time_of(paths.output, "run_start")
    opened = [
        float(line)
        for rank in range(2)
        for line in (paths.output / f"opens_{rank}").read_text().split()
    ]
    ready = max(float((paths.output / f"ready_{rank}").read_text()) for rank in range(2))
    assert int(1000 * ready) <= started
    assert (min(opened) * 1000 >= started) == (division == "closed")
    assert mlperf_values(paths.output, "train_samples") == [21]
    (digests,) = mlperf_values(paths.output, "fluxtrain_data")
    assert set(digests) == {"train", "validation"}


def test_the_initialisation_begins_with_the_first_process(tmp_path: Path) -> None:
    before = time.time()
    assert (
        fluxtrain("run", str(MICRO), "--schedule.steps=25", f"--output={tmp_path}").returncode == 0
    )
    checked = (tmp_path / "config.json").stat().st_mtime  # after imports and checks of the command
    assert before - 0.05 < time_of(tmp_path, "init_start") / 1000 < checked


def test_a_process_knows_when_it_began(tmp_path: Path) -> None:
    code = "from fluxtrain.launch.environment import process_start as p; print(p())"
    before = time.time()
    told = float(subprocess.check_output([sys.executable, "-c", code]))
    assert before - 0.05 < told < time.time()
    assert time.time() - process_start(tmp_path) < 1, "the present time without /proc"
    (tmp_path / "self").mkdir()
    (tmp_path / "self/stat").write_text("7 (a ) b) " + " ".join(["0"] * 19) + " 5000 0")
    (tmp_path / "uptime").write_text("80.5 10.0")
    age = 80.5 - 5000 / os.sysconf("SC_CLK_TCK")
    assert time.time() - process_start(tmp_path) == pytest.approx(age, abs=0.5)


SHARD = 137_472
STEP = 4096
SHAPES = {"txt": [1, 16], "vec": [16], "mean": [4, 2, 2], "logvar": [4, 2, 2]}
LOGVAR = -30.0
"""Latents without noise of their own: the noise of a timestep can be computed from the mixture."""


def write_set(folder: Path, num_samples: int) -> None:
    """Write a set of ``num_samples`` that are zeros, but for LOGVAR; equal shards are one file.

    Only headers and the last tensor of a file take space.
    """
    folder.mkdir(parents=True)
    files: dict[int, Path] = {}
    shards = []
    for number, start in enumerate(range(0, num_samples, SHARD)):
        count = min(SHARD, num_samples - start)
        path = folder / f"shard_{number:06d}.safetensors"
        if count in files:
            path.hardlink_to(files[count])
        else:
            write_shard(path, count)
        files[count] = path
        shards.append({"file": path.name, "samples": count})
    (folder / "dataset.json").write_text(json.dumps({"format": 1, "shards": shards}))


def write_shard(path: Path, num_samples: int) -> None:
    header, end = dict[str, Any](), 0
    for name, shape in SHAPES.items():
        span = [end, end + 4 * num_samples * torch.Size(shape).numel()]
        header[name] = {"dtype": "F32", "shape": [num_samples, *shape], "data_offsets": span}
        end = span[1]
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.seek(8 + len(text) + span[0])
        file.write(torch.full(((span[1] - span[0]) // 4,), LOGVAR).numpy().tobytes())


def train_flushed(config: RunConfig, paths: RunPaths, world: World) -> None:
    """Train after the node's init container has left the time at which it flushed the caches."""
    (paths.data / "flushed").write_text(str(int(time.time())))
    os.environ[ENV_FLUSHED] = str(paths.data / "flushed")
    ranks.train_alone(config, paths, world)


@pytest.mark.parametrize(("missing", "code"), [(0, 0), (1, EXIT_USAGE)])
def test_the_benchmarks_sizes_start_as_closed_and_pass_review(
    tmp_path: Path, missing: int, code: int
) -> None:
    write_set(tmp_path / "train", MLPERF_TRAINING_SET - missing)
    write_set(tmp_path / "validation", MLPERF_VALIDATION_SET)
    write_empty_text(tmp_path / "empty.safetensors", torch.zeros(1, 16), torch.zeros(16))
    changes = {
        "seed": 815,
        "model": {"depth": 0},
        "data": {"order": "sequential", "latent_size": 2, "text_length": 1},
        "schedule": {"global_batch_size": STEP, "steps": 256},
        "parallel": {"micro_batch_size": STEP},
        "evaluation": {"every_samples": 262_144, "target_loss": 0.586, "batch_size": 1024},
    }
    config = resolve(merge_all(ENCODED_RUN, changes))
    config = as_closed(config.model_copy(update={"preset": "mlperf-schnell"}))
    paths = RunPaths(tmp_path / "output", tmp_path, tmp_path)
    assert ranks.finish(train_flushed, config, paths) == [code], ranks.output_of(paths)
    assert mlperf_values(paths.output, "submission_division") == ["closed"]
    if missing:
        text = f"data.train has {MLPERF_TRAINING_SET - 1} samples; allowed: {MLPERF_TRAINING_SET}"
        assert f"{text} (training rules 6.5)" in ranks.output_of(paths)
        return
    assert mlperf_values(paths.output, "train_samples") == [MLPERF_TRAINING_SET]
    assert mlperf_values(paths.output, "eval_samples") == [MLPERF_VALIDATION_SET]
    run = read_run(paths.output / MLPERF_FILE)
    assert run.samples == 262_144, "the target is reached in the first evaluation"
    found = {each.rule for each in rule_findings(run)}
    assert found <= {"evaluations-take-their-time"}, "a note: the times are not of this model"
    assert [each.rule for each in compliance_findings(run, "6.1.0")] == []
