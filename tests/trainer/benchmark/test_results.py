"""Results are kept after each trial, belong to one config, and are of the same mix of sizes in each part."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.commands import fluxtrain

from fluxtrain.benchmark.report import render
from fluxtrain.benchmark.results import (
    CSV_FILE,
    JSON_FILE,
    NUM_PARTS,
    Measurement,
    Outcome,
    Result,
    Results,
    Status,
    Trial,
    settings,
)
from fluxtrain.benchmark.trial import in_turn, mixed_sources
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.data import Size
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.contract.run.setting import Setting
from fluxtrain.data.loader import training_order
from fluxtrain.data.order import BucketOrder
from fluxtrain.data.shards import Sample, ShardWriter
from fluxtrain.errors import ConfigError, DataError

SETTING = Setting(512, 512, "bfloat16", "none", 0.25, None)
FACTS = {"device": "AMD Instinct MI300X", "device_memory_bytes": 192 << 30, "compiled": True}


def make_config(**changes: Any) -> RunConfig:
    return resolve({"preset": "micro", "task": "benchmark", **changes})


def record(step: int, rate: float, seconds: float) -> dict[str, Any]:
    return {
        "step": step,
        "samples": 64 * step,
        "samples_per_second": rate,
        "seconds": seconds,
        "tflops_per_gpu": rate,
        "mfu": rate / 1000,
        "mfu_peak": "a peak",
        "memory_allocated_bytes": 100 << 30,
        "memory_reserved_bytes": 110 << 30,
        "data_wait_seconds": 1.0,
    }


def outcome(rates: list[float]) -> Outcome:
    records = [record(4 * n, rate, 10.0 * n) for n, rate in enumerate(rates, 1)]
    return Outcome(Status.DONE, "", records, FACTS)


def trial(batch: int, is_measured: bool = True) -> Trial:
    return Trial(SETTING, batch, 8, 8 * batch, is_measured)


def measured(batch: int = 8) -> Result:
    found = Measurement.of(outcome([1.0, 1.0, 36.0, 40.0, 44.0, 32.0, 40.0]), 8)
    return Result(trial(batch), Status.DONE, "", found)


def test_a_measurement_is_the_median_of_the_parts_after_the_warm_up() -> None:
    found = measured().measurement
    assert found is not None
    assert (found.images_per_second_per_gpu, found.slowest, found.fastest) == (5.0, 4.0, 5.5)
    assert found.step_seconds == pytest.approx(64 / 40)
    assert (found.tflops_per_gpu, found.mfu) == (40.0, 0.04)
    assert found.data_wait_fraction == pytest.approx(5.0 / 50.0)
    assert (found.device, found.compiled) == ("AMD Instinct MI300X", True)


def test_without_a_warm_up_the_first_part_counts() -> None:
    found = Measurement.of(outcome([8.0] * 5), 8)
    assert (found.slowest, found.data_wait_fraction) == (1.0, 0.1)


def test_a_stopped_benchmark_knows_what_it_measured(tmp_path: Path) -> None:
    results = Results(tmp_path, make_config())
    out = Result(trial(9, is_measured=False), Status.OUT_OF_MEMORY, "no room", None)
    results.add(out)
    results.add(measured())
    again = Results(tmp_path, make_config(benchmark={"steps": 7}, logging={"metrics_port": 0}))
    assert again.get(trial(9, is_measured=False)) == out
    assert again.get(trial(8)) == measured()
    assert again.get(trial(9)) is None
    assert (again.num_trials, again.measured) == (2, [measured()])


@pytest.mark.parametrize(
    ("status", "memory", "is_known"),
    [
        (Status.DONE, 2.0, True),
        (Status.OUT_OF_MEMORY, 1.0, True),
        (Status.OUT_OF_MEMORY, 2.0, False),
        (Status.FAILED, 1.0, False),
    ],
)
def test_another_start_repeats_what_may_end_otherwise(
    tmp_path: Path, status: Status, memory: float, is_known: bool
) -> None:
    tried = trial(9, is_measured=False)
    first = Results(tmp_path, make_config(benchmark={"memory_gib": 1.0}))
    first.add(Result(tried, status, "", None))
    again = Results(tmp_path, make_config(benchmark={"memory_gib": memory}))
    assert (again.get(tried) is not None) == is_known


def test_results_of_another_config_are_refused(tmp_path: Path) -> None:
    Results(tmp_path, make_config()).add(measured())
    with pytest.raises(ConfigError, match="of another run; use another folder"):
        Results(tmp_path, make_config(model={"depth": 2}))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"run": {}}'])
def test_a_damaged_file_is_an_error_with_its_name(tmp_path: Path, text: str) -> None:
    (tmp_path / JSON_FILE).write_text(text)
    with pytest.raises((DataError, ConfigError), match=JSON_FILE):
        Results(tmp_path, make_config())


def test_the_csv_has_a_row_for_each_measurement(tmp_path: Path) -> None:
    results = Results(tmp_path, make_config())
    results.add(Result(trial(4, is_measured=False), Status.DONE, "", None))
    results.add(measured())
    results.add(Result(trial(16), Status.OUT_OF_MEMORY, "no room", None))
    with (tmp_path / CSV_FILE).open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["micro_batch_size"], row["status"]) for row in rows] == [
        ("8", "done"),
        ("16", "out of memory"),
    ]
    assert float(rows[0]["images_per_second_per_gpu"]) == 5.0
    assert rows[1]["images_per_second_per_gpu"] == ""
    assert json.loads((tmp_path / JSON_FILE).read_text())["run"]["preset"] == "micro"


def test_the_table_tells_speed_memory_and_what_failed() -> None:
    out = Result(trial(16), Status.OUT_OF_MEMORY, "no room", None)
    failed = Result(trial(32), Status.FAILED, "ValueError: x (trials/0003/rank_0.log)", None)
    lines = render([result.row() for result in (measured(), out, failed)]).splitlines()
    assert len({len(line) for line in lines[:2]}) == 1, "columns are aligned"
    assert "512 px   512   bfloat16         25%       yes      8      8" in lines[1]
    for part in ("5", "4-5.5", "40", "4.0%", "100.0", "110.0", "10%"):
        assert part in lines[1].split(), part
    assert lines[2].endswith("out of memory")
    assert lines[4:] == [
        "on AMD Instinct MI300X; peak of MFU: a peak",
        "failed at batch 32: ValueError: x (trials/0003/rank_0.log)",
    ]


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


def make_mixed_config(**changes: Any) -> RunConfig:
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
    config = make_mixed_config(benchmark={"steps": steps, "warmup_steps": 1})
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
    config = make_mixed_config()
    [setting] = settings(config)
    assert (setting.num_sizes, setting.largest) == (9, "64 x 64")
    trial = Trial(setting, 2, 2, 4, is_measured=False)
    assert sizes_of(trial, config, 0, tmp_path) == [(8, 8)] * 3


def test_without_buckets_a_trial_has_the_data_of_the_run(tmp_path: Path) -> None:
    config = make_mixed_config(data={"image_size": 64})
    assert mixed_sources(config, tmp_path, 5) is None
    [setting] = settings(config)
    assert (setting.shape, setting.num_sizes) == ("64 px", 1)
    assert Trial(setting, 1, 1, 1, is_measured=True).config(config).data.order == config.data.order


def test_swept_sizes_have_their_own_buckets() -> None:
    found = list(settings(make_mixed_config(benchmark={"image_sizes": [32, 64]})))
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
    config = make_mixed_config(data=data, benchmark={"steps": 95})
    [setting] = settings(config)
    trial = Trial(setting, 2, 1, 2, is_measured=True)
    length = trial.part_steps(config)
    part = Counter(sizes_of(trial, config, length, tmp_path)[:length])
    assert (length, part) == (20, {(4, 4): 10, (2, 6): 5, (6, 2): 4, (2, 8): 1})


@pytest.mark.proof
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
