"""A stand-in set of the benchmark's sizes, with tiny encodings, starts as closed and passes review."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer import ranks
from tests.trainer.outputs import mlperf_values
from tests.trainer.small_runs import ENCODED_RUN, as_closed, merge_all

from fluxtrain.contract.process import ENV_FLUSHED, MLPERF_FILE, RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.presets import MLPERF_TRAINING_SET, MLPERF_VALIDATION_SET
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.sources import write_empty_text
from fluxtrain.errors import EXIT_USAGE
from fluxtrain.mlperf.evidence import read_run
from fluxtrain.mlperf.review.review import compliance_findings, rule_findings
from fluxtrain.parallel.distributed import World

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
