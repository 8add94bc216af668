"""The evaluation uses the whole validation set, logs what it skipped, or fails the run."""

from __future__ import annotations

import os
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cluster.free_ports import free_port
from tests.trainer import ranks
from tests.trainer.outputs import losses, mlperf_events, mlperf_values, records
from tests.trainer.small_runs import (
    ENCODED_RUN,
    IMAGES,
    NUM_SAMPLES,
    SHARD_SIZE,
    as_closed,
    merge_all,
    write_encoded,
)
from tests.trainer.tiny_encoders import write_encoders, write_images

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import EXIT_DIVERGED, EXIT_USAGE
from fluxtrain.runtime.safetensors import read_header

NAN = b"\xff" * 4


def run(
    paths: RunPaths, size: int, *changes: dict[str, Any], closed: bool = False
) -> list[int | None]:
    config = resolve(merge_all(ENCODED_RUN, *changes))
    config = as_closed(config) if closed else config
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


def assert_no_result(paths: RunPaths) -> None:
    assert mlperf_values(paths.output, "eval_accuracy") == []
    assert mlperf_values(paths.output, "run_stop") == []
    assert losses(paths.output, "eval_loss") == {}


TWO_TIMESTEPS = [i for i in range(NUM_SAMPLES) if i % 8 in (0, 7)]  # all of t = 0 and t = 7/8
BAD_SAMPLES = [
    ("the first, which is the filler's", [0], "mean", 1),
    ("the last", [NUM_SAMPLES - 1], "logvar", 3),
    ("one text", [7], "txt", 2),
    ("two timesteps", TWO_TIMESTEPS, "vec", 2),
    ("all", list(range(NUM_SAMPLES)), "mean", 3),
]


@pytest.mark.parametrize(
    ("bad", "field", "size"), [row[1:] for row in BAD_SAMPLES], ids=[row[0] for row in BAD_SAMPLES]
)
def test_an_unreadable_validation_sample_fails_a_closed_run(
    paths: RunPaths, bad: list[int], field: str, size: int
) -> None:
    damage(paths.data, bad, field)
    assert run(paths, size, closed=True) == [EXIT_USAGE] * size
    for rank in range(size):  # torchrun reports the message of whichever ends first
        output = ranks.output_of(paths, rank)
        assert f"{len(bad)} of {NUM_SAMPLES} validation samples could not be read" in output
        assert f"record {bad[0] % SHARD_SIZE} (key 'key{bad[0]}'): not finite" in output
        assert "spec.run.logging.mlperf.division" in output
    assert_no_result(paths)


def test_an_evaluation_before_the_first_step_fails_a_closed_run(paths: RunPaths) -> None:
    damage(paths.data, [3])
    at_start = {"evaluation": {"at_start": True}}
    assert run(paths, 2, at_start, closed=True) == [EXIT_USAGE] * 2
    assert "(key 'key3')" in ranks.output_of(paths)
    assert mlperf_values(paths.output, "block_start") == [], "no step was taken"


@pytest.mark.parametrize(("size", "bad"), [(1, TWO_TIMESTEPS), (3, TWO_TIMESTEPS), (1, [])])
def test_an_open_run_continues_and_logs_how_many_samples_it_used(
    paths: RunPaths, size: int, bad: list[int]
) -> None:
    damage(paths.data, bad)
    rest = NUM_SAMPLES - len(bad)
    assert run(paths, size, {"data": {"max_bad_fraction": 0.5}}) == [0] * size
    evaluations = [record for record in records(paths.output) if "eval_loss" in record]
    assert [record["eval_samples"] for record in evaluations] == [rest, rest]
    assert (evaluations[0]["eval_loss_by_timestep"][0] is None) == bool(bad)
    assert mlperf_values(paths.output, "eval_samples") == [rest]
    logged = [event for event in mlperf_events(paths.output) if event["key"] == "eval_accuracy"]
    assert [event["metadata"]["eval_samples"] for event in logged] == [rest, rest]
    output = ranks.output_of(paths)
    skipped = f", {len(bad)} could not be read\n" if bad else "\n"
    assert output.count(f"on {rest} samples{skipped}") == 2
    named = [line for line in output.splitlines() if "skipped an unreadable validation" in line]
    assert len(named) == len(bad), "each is named once, not at every evaluation"
    assert all(any(f"'key{index}'" in line for line in named) for index in bad)


@pytest.mark.parametrize(
    ("bad", "fraction", "code"),
    [([4], 0.0001, 0), ([4, 5], 0.0001, EXIT_USAGE), (list(range(NUM_SAMPLES)), 1.0, EXIT_USAGE)],
    ids=["one is allowed", "two are too many", "none is left"],
)
def test_an_open_run_may_skip_only_so_many_samples(
    paths: RunPaths, bad: list[int], fraction: float, code: int
) -> None:
    damage(paths.data, bad)
    assert run(paths, 2, {"data": {"max_bad_fraction": fraction}}) == [code] * 2
    if code:
        assert_no_result(paths)
        assert "spec.run.data.max_bad_fraction" in ranks.output_of(paths)


@pytest.mark.parametrize("closed", [True, False])
def test_a_loss_that_is_not_finite_on_readable_samples_is_divergence(
    paths: RunPaths, closed: bool
) -> None:
    write_encoded(paths.data, validation_value=1e30)  # finite, but its square is not
    assert run(paths, 2, {"evaluation": {"target_loss": 1e6}}, closed=closed) == [EXIT_DIVERGED] * 2
    assert "the evaluation loss is nan at step 1" in ranks.output_of(paths)
    assert_no_result(paths)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_unreadable_images_are_treated_alike(tmp_path: Path, size: int) -> None:
    for part in ("train", "validation"):
        write_images(tmp_path / part, NUM_SAMPLES, timesteps=part == "validation")
    damage_images(tmp_path / "validation", ["000000000", "000000020"])
    paths = RunPaths(tmp_path / "output", tmp_path, write_encoders(tmp_path))
    assert run(paths, size, IMAGES, closed=True) == [EXIT_USAGE] * size
    assert f"2 of {NUM_SAMPLES} validation samples could not be read" in ranks.output_of(paths)
    assert "key '000000020': its image is unreadable" in ranks.output_of(paths)
    assert_no_result(paths)
    again = RunPaths(tmp_path / "again", tmp_path, tmp_path)
    assert run(again, size, IMAGES, {"data": {"max_bad_fraction": 0.2}}) == [0] * size
    assert mlperf_values(again.output, "eval_samples") == [NUM_SAMPLES - 2]


def damage_images(folder: Path, keys: list[str]) -> None:
    """Write random bytes over the second half of the images called ``keys``."""
    for path in folder.glob("*.tar"):
        with tarfile.open(path) as tar:
            members = [m for m in tar if m.name.removesuffix(".png") in keys and "png" in m.name]
        with path.open("r+b") as file:
            for member in members:
                file.seek(member.offset_data + 60)
                file.write(os.urandom(member.size - 80))
