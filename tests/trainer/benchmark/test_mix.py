"""With buckets each part of a measurement has the same mix of sizes; the largest tells whether one fits."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.commands import fluxtrain

from fluxtrain.benchmark.results import NUM_PARTS, Trial, settings
from fluxtrain.benchmark.trial import in_turn, mixed_sources
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.data import Size
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.loader import training_order
from fluxtrain.data.order import BucketOrder
from fluxtrain.data.shards import Sample, ShardWriter

COUNTS: dict[Size, int] = {(4, 4): 9, (2, 6): 5, (6, 2): 4, (2, 8): 1}
"""Samples of each height and width of latents in an encoded set."""
FILE = """
apiVersion: fluxtrain.dev/v1alpha1
kind: FluxTraining
metadata: {name: benchmark}
spec:
  run:
    preset: micro
    task: benchmark
    data: {num_workers: 0, image_size: 32, buckets: {step: 16}}
    logging: {metrics_port: 0}
    benchmark: {micro_batch_sizes: [2], steps: 5, warmup_steps: 1, memory_gib: 2}
"""
BUCKETS = {"image_size": 64, "buckets": {"step": 16}}


def make_config(**changes: Any) -> RunConfig:
    run = {"preset": "micro", "task": "benchmark", "data": BUCKETS, **changes}
    return resolve(run)


def sizes_of(trial: Trial, config: RunConfig, turns: int, root: Path) -> list[Size]:
    """Return the size of each step of ``trial``, all of whose batches are whole."""
    run = trial.config(config)
    sources = mixed_sources(run, root, turns)
    assert sources is not None
    order = training_order(run, sources.train)
    assert isinstance(order, BucketOrder)
    steps = range(trial.num_steps(config))
    assert {order.count(step) for step in steps} == {run.schedule.global_batch_size}
    return [order.latent_size(step) for step in steps]


@pytest.mark.parametrize("steps", [1, 30, 60])
@pytest.mark.parametrize(("ranks", "batch"), [(1, 1), (2, 3), (3, 7)])
def test_each_part_has_every_size_equally_often(
    tmp_path: Path, steps: int, ranks: int, batch: int
) -> None:
    config = make_config(benchmark={"steps": steps, "warmup_steps": 1})
    [setting] = settings(config)
    trial = Trial(setting, batch, ranks, ranks * batch, is_measured=True)
    length = trial.part_steps(config)
    found = sizes_of(trial, config, length, tmp_path)
    assert len(found) == (NUM_PARTS + 1) * length
    each = length // len(config.data.latent_sizes)
    for first in range(0, len(found), length):
        part = Counter(found[first : first + length])
        assert part == dict.fromkeys(config.data.latent_sizes, each)


def test_a_trial_that_has_to_fit_has_the_largest_size_only(tmp_path: Path) -> None:
    config = make_config()
    [setting] = settings(config)
    assert (setting.num_sizes, setting.largest) == (9, "64 x 64")
    trial = Trial(setting, 2, 2, 4, is_measured=False)
    assert sizes_of(trial, config, 0, tmp_path) == [(8, 8)] * 3


def test_without_buckets_a_trial_has_the_data_of_the_run(tmp_path: Path) -> None:
    config = make_config(data={"image_size": 64})
    assert mixed_sources(config, tmp_path, 5) is None
    [setting] = settings(config)
    assert (setting.shape, setting.num_sizes) == ("64 px", 1)
    assert Trial(setting, 1, 1, 1, is_measured=True).config(config).data.order == config.data.order


def test_swept_sizes_have_their_own_buckets() -> None:
    found = list(settings(make_config(benchmark={"image_sizes": [32, 64]})))
    assert [(each.num_sizes, each.largest) for each in found] == [(5, "32 x 32"), (9, "64 x 64")]
    assert [each.shape for each in found] == ["5 sizes to 32 x 32 px", "9 sizes to 64 x 64 px"]


@pytest.mark.parametrize(
    ("counts", "turns", "expected"),
    [
        ({(8, 8): 1}, 3, {(8, 8): 3}),
        ({(8, 8): 1, (6, 10): 1}, 4, {(8, 8): 2, (6, 10): 2}),
        ({(8, 8): 75, (6, 10): 25}, 4, {(8, 8): 3, (6, 10): 1}),
        ({(8, 8): 1, (6, 10): 999}, 4, {(8, 8): 1, (6, 10): 3}),  # the largest is in it
        ({(8, 8): 1, (6, 10): 3, (10, 6): 3}, 1, {(8, 8): 1}),
        ({(8, 8): 10, (6, 10): 11, (4, 16): 12}, 2, {(8, 8): 1, (4, 16): 1}),
    ],
)
def test_the_turns_have_the_shares_of_the_set(
    counts: dict[Size, int], turns: int, expected: dict[Size, int]
) -> None:
    assert Counter(in_turn(counts, turns)) == expected


def test_the_shares_are_those_of_an_encoded_set(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "train", shard_size=4, dtype=torch.float32) as writer:
        for size, count in COUNTS.items():
            for index in range(count):
                texts, latents = (torch.zeros(4, 16), torch.zeros(16)), torch.zeros(4, *size)
                writer.add(Sample(f"{size}-{index}", "a caption", *texts, latents, latents))
    data = {"source": "encoded", "buckets": {"step": 16}}
    config = make_config(data=data, benchmark={"steps": 95})
    [setting] = settings(config)
    trial = Trial(setting, 2, 1, 2, is_measured=True)
    length = trial.part_steps(config)
    part = Counter(sizes_of(trial, config, length, tmp_path)[:length])
    assert (length, part) == (20, {(4, 4): 10, (2, 6): 5, (6, 2): 4, (2, 8): 1})


@pytest.mark.slow
def test_a_benchmark_with_buckets_tells_the_sizes(tmp_path: Path) -> None:
    file, output = tmp_path / "job.yaml", tmp_path / "run"
    file.write_text(FILE)
    done = fluxtrain("run", str(file), "--output", str(output))
    assert done.returncode == 0, done.stderr
    with (output / "benchmark.csv").open() as table:
        [row] = csv.DictReader(table)
    assert (row["image_size"], row["num_sizes"], row["largest"]) == ("32", "5", "32 x 32")
    assert float(row["images_per_second_per_gpu"]) > 0
    assert int(row["memory_allocated_bytes"]) > 0
    assert "5 sizes to 32 x 32 px" in done.stdout
