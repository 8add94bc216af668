"""The evaluation is over the whole validation set, or says what it left out, or ends the run."""

from __future__ import annotations

import io
import json
import os
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.free_ports import free_port
from tests.trainer import ranks
from tests.trainer.test_distributed import be_rank
from tests.trainer.tiny_encoders import CHANNELS, TOKENS, WIDTH, write_encoders, write_images

from fluxtrain.contract.launch import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.data.empty_text import write_empty_text
from fluxtrain.data.sample_writer import Sample
from fluxtrain.data.shard_writer import ShardWriter
from fluxtrain.distributed import World, process_group
from fluxtrain.errors import EXIT_DIVERGED, EXIT_USAGE
from fluxtrain.safetensors_file import read_header
from fluxtrain.train import train

COUNT, SHARD = 21, 8  # the last batch is filled up with any number of ranks
NAN = b"\xff" * 4
TWELVE = {
    "preset": "micro",
    "data": {"source": "encoded"},
    "schedule": {"global_batch_size": 12, "steps": 2, "warmup_steps": 0},
    "evaluation": {"every_samples": 12, "batch_size": 4},
    "checkpoint": {"every_steps": 0},
    "logging": {"every_steps": 1, "metrics_port": 0},
}
OPEN = {"logging": {"mlperf": {"division": "open"}}}
PICTURES = {
    "model": {"in_channels": 4 * CHANNELS, "vec_in_dim": WIDTH, "context_in_dim": WIDTH},
    "data": {"source": "images", "text_length": TOKENS},
    "encoders": {"precision": "float32"},
}


def train_together(config: RunConfig, paths: RunPaths, world: World, *, port: int) -> None:
    be_rank(world, port)
    with process_group() as met:
        train(config, paths, met)


def run(paths: RunPaths, size: int, *changes: dict[str, Any]) -> list[int | None]:
    config = resolve(merge_all(TWELVE, *changes))
    return ranks.finish(partial(train_together, port=free_port()), config, paths, size)


def merge_all(base: dict[str, Any], *changes: dict[str, Any]) -> dict[str, Any]:
    for change in changes:
        base = merge(base, change)
    return base


def write_encoded(root: Path, validation_value: float = 0.5) -> None:
    for part, value in (("train", 0.5), ("validation", validation_value)):
        with ShardWriter(root / part, shard_size=SHARD, dtype=torch.float32) as writer:
            for index in range(COUNT):
                mean, logvar = torch.full((4, 4, 4), value), torch.full((4, 4, 4), -9.0)
                texts = torch.randn(4, 16), torch.randn(16)
                writer.add(Sample(f"key{index}", "a caption", *texts, mean, logvar))
    write_empty_text(root / "empty.safetensors", torch.zeros(4, 16), torch.zeros(16))


def spoil(root: Path, indices: list[int], field: str = "mean") -> None:
    for index in indices:
        path = root / "validation" / f"shard_{index // SHARD:06d}.safetensors"
        span = read_header(path)[field]
        with path.open("r+b") as file:
            file.seek(span.offset + index % SHARD * span.row_bytes)
            file.write(NAN)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    write_encoded(tmp_path)
    return RunPaths(tmp_path / "output", tmp_path, tmp_path)


def events(paths: RunPaths) -> list[dict[str, Any]]:
    lines = (paths.output / "mlperf.log").read_text().splitlines()
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]


def values(paths: RunPaths, key: str) -> list[Any]:
    return [event["value"] for event in events(paths) if event["key"] == key]


def evaluations(paths: RunPaths) -> list[dict[str, Any]]:
    lines = (paths.output / "metrics.jsonl").read_text().splitlines()
    return [record for line in lines if "eval_loss" in (record := json.loads(line))]


def require_no_claim(paths: RunPaths) -> None:
    assert values(paths, "eval_accuracy") == []
    assert values(paths, "run_stop") == []
    assert evaluations(paths) == []


LEVELS = [index for index in range(COUNT) if index % 8 in (0, 7)]  # all of t = 0 and of t = 7/8
BAD = [
    ("the first, which fills up", [0], "mean", 1),
    ("the last", [COUNT - 1], "logvar", 3),
    ("one text", [7], "txt", 2),
    ("two levels", LEVELS, "vec", 2),
    ("all", list(range(COUNT)), "mean", 3),
]


@pytest.mark.parametrize(
    ("bad", "field", "size"), [row[1:] for row in BAD], ids=[row[0] for row in BAD]
)
def test_a_closed_run_ends_at_an_unreadable_validation_sample(
    paths: RunPaths, bad: list[int], field: str, size: int
) -> None:
    spoil(paths.data, bad, field)
    assert run(paths, size) == [EXIT_USAGE] * size
    for rank in range(size):  # torchrun tells the words of whichever ends first
        words = ranks.said(paths, rank)
        assert f"{len(bad)} of {COUNT} validation samples could not be read" in words
        assert f"record {bad[0] % SHARD} (key 'key{bad[0]}'): not finite" in words
        assert "spec.run.logging.mlperf.division" in words
    require_no_claim(paths)


def test_a_closed_run_ends_where_it_evaluates_before_the_first_step(paths: RunPaths) -> None:
    spoil(paths.data, [3])
    assert run(paths, 2, {"evaluation": {"at_start": True}}) == [EXIT_USAGE] * 2
    assert "(key 'key3')" in ranks.said(paths)
    assert values(paths, "block_start") == [], "no step was taken"


@pytest.mark.parametrize("size", [1, 3])
def test_an_open_run_goes_on_and_says_everywhere_how_many_it_used(
    paths: RunPaths, size: int
) -> None:
    spoil(paths.data, LEVELS)
    rest = COUNT - len(LEVELS)
    assert run(paths, size, OPEN, {"data": {"max_bad_fraction": 0.5}}) == [0] * size
    assert [record["eval_samples"] for record in evaluations(paths)] == [rest, rest]
    assert evaluations(paths)[0]["eval_loss_by_timestep"][0] is None
    assert values(paths, "eval_samples") == [rest]
    used = [e["metadata"]["eval_samples"] for e in events(paths) if e["key"] == "eval_accuracy"]
    assert used == [rest, rest]
    words = ranks.said(paths)
    assert words.count(f"on {rest} samples, {len(LEVELS)} could not be read") == 2
    told = [line for line in words.splitlines() if "skipped an unreadable validation" in line]
    assert len(told) == len(LEVELS), "each is named once, not at every evaluation"
    assert all(any(f"'key{index}'" in line for line in told) for index in LEVELS)


def test_an_open_run_on_a_whole_set_says_so(paths: RunPaths) -> None:
    assert run(paths, 1, OPEN) == [0]
    assert values(paths, "eval_samples") == [COUNT]
    assert [record["eval_samples"] for record in evaluations(paths)] == [COUNT, COUNT]
    assert f"on {COUNT} samples\n" in ranks.said(paths)


@pytest.mark.parametrize(
    ("bad", "fraction", "code"),
    [([4], 0.0001, 0), ([4, 5], 0.0001, EXIT_USAGE), (list(range(COUNT)), 1.0, EXIT_USAGE)],
    ids=["one is bad luck", "two are too many", "none is left"],
)
def test_what_an_open_run_may_leave_out_is_bounded(
    paths: RunPaths, bad: list[int], fraction: float, code: int
) -> None:
    spoil(paths.data, bad)
    assert run(paths, 2, OPEN, {"data": {"max_bad_fraction": fraction}}) == [code] * 2
    if code:
        require_no_claim(paths)
        assert "spec.run.data.max_bad_fraction" in ranks.said(paths)


@pytest.mark.parametrize("division", ["closed", "open"])
def test_a_loss_that_is_no_number_on_readable_samples_is_divergence(
    paths: RunPaths, division: str
) -> None:
    write_encoded(paths.data, validation_value=1e30)  # finite, but its square is not
    changes = {"logging": {"mlperf": {"division": division}}, "evaluation": {"target_loss": 1e6}}
    assert run(paths, 2, changes) == [EXIT_DIVERGED] * 2
    assert "the evaluation loss is nan at step 1" in ranks.said(paths)
    require_no_claim(paths)


@pytest.mark.parametrize("size", [1, 2])
def test_pictures_are_held_to_the_same(tmp_path: Path, size: int) -> None:
    for part in ("train", "validation"):
        write_images(tmp_path / part, COUNT, timesteps=part == "validation")
    cut_pictures(tmp_path / "validation", ["000000000", "000000020"])
    paths = RunPaths(tmp_path / "output", tmp_path, write_encoders(tmp_path))
    assert run(paths, size, PICTURES) == [EXIT_USAGE] * size
    assert f"2 of {COUNT} validation samples could not be read" in ranks.said(paths)
    assert "key '000000020': its image is unreadable" in ranks.said(paths)
    require_no_claim(paths)
    more = {"data": {"max_bad_fraction": 0.2}}
    again = RunPaths(tmp_path / "again", tmp_path, tmp_path)
    assert run(again, size, PICTURES, OPEN, more) == [0] * size
    assert values(again, "eval_samples") == [COUNT - 2]


def cut_pictures(folder: Path, keys: list[str]) -> None:
    """Write zeros over the second half of the pictures called ``keys``."""
    for path in folder.glob("*.tar"):
        with tarfile.open(path) as tar:
            found = [m for m in tar if m.name.removesuffix(".png") in keys and "png" in m.name]
        with path.open("r+b") as file:
            for member in found:
                file.seek(member.offset_data + 60, io.SEEK_SET)
                file.write(os.urandom(member.size - 80))
