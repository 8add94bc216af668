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
from tests.trainer.tiny_encoders import CHANNELS, TOKENS, WIDTH, write_encoders, write_pictures

from fluxtrain.contract.config import RunConfig
from fluxtrain.contract.launch import Places
from fluxtrain.contract.resolve import merge, resolve
from fluxtrain.data.empty_text import write_empty_text
from fluxtrain.data.safetensors import read_header
from fluxtrain.data.writer import EncodedWriter, Sample
from fluxtrain.distributed import World, joined
from fluxtrain.errors import EXIT_DIVERGED, EXIT_USAGE
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


def train_together(config: RunConfig, places: Places, world: World, *, port: int) -> None:
    be_rank(world, port)
    with joined() as met:
        train(config, places, met)


def run(places: Places, size: int, *changes: dict[str, Any]) -> list[int | None]:
    config = resolve(merge_all(TWELVE, *changes))
    return ranks.finish(partial(train_together, port=free_port()), config, places, size)


def merge_all(base: dict[str, Any], *changes: dict[str, Any]) -> dict[str, Any]:
    for change in changes:
        base = merge(base, change)
    return base


def write_encoded(root: Path, validation_value: float = 0.5) -> None:
    for part, value in (("train", 0.5), ("validation", validation_value)):
        with EncodedWriter(root / part, shard_size=SHARD, dtype=torch.float32) as writer:
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
def places(tmp_path: Path) -> Places:
    write_encoded(tmp_path)
    return Places(tmp_path / "output", tmp_path, tmp_path)


def events(places: Places) -> list[dict[str, Any]]:
    lines = (places.output / "mlperf.log").read_text().splitlines()
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]


def values(places: Places, key: str) -> list[Any]:
    return [event["value"] for event in events(places) if event["key"] == key]


def evaluations(places: Places) -> list[dict[str, Any]]:
    lines = (places.output / "metrics.jsonl").read_text().splitlines()
    return [record for line in lines if "eval_loss" in (record := json.loads(line))]


def require_no_claim(places: Places) -> None:
    assert values(places, "eval_accuracy") == []
    assert values(places, "run_stop") == []
    assert evaluations(places) == []


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
    places: Places, bad: list[int], field: str, size: int
) -> None:
    spoil(places.data, bad, field)
    assert run(places, size) == [EXIT_USAGE] * size
    for rank in range(size):  # torchrun tells the words of whichever ends first
        words = ranks.said(places, rank)
        assert f"{len(bad)} of {COUNT} validation samples could not be read" in words
        assert f"record {bad[0] % SHARD} (key 'key{bad[0]}'): not finite" in words
        assert "spec.run.logging.mlperf.division" in words
    require_no_claim(places)


def test_a_closed_run_ends_where_it_evaluates_before_the_first_step(places: Places) -> None:
    spoil(places.data, [3])
    assert run(places, 2, {"evaluation": {"at_start": True}}) == [EXIT_USAGE] * 2
    assert "(key 'key3')" in ranks.said(places)
    assert values(places, "block_start") == [], "no step was taken"


@pytest.mark.parametrize("size", [1, 3])
def test_an_open_run_goes_on_and_says_everywhere_how_many_it_used(
    places: Places, size: int
) -> None:
    spoil(places.data, LEVELS)
    rest = COUNT - len(LEVELS)
    assert run(places, size, OPEN, {"data": {"max_bad_fraction": 0.5}}) == [0] * size
    assert [record["eval_samples"] for record in evaluations(places)] == [rest, rest]
    assert evaluations(places)[0]["eval_loss_by_timestep"][0] is None
    assert values(places, "eval_samples") == [rest]
    used = [e["metadata"]["eval_samples"] for e in events(places) if e["key"] == "eval_accuracy"]
    assert used == [rest, rest]
    words = ranks.said(places)
    assert words.count(f"on {rest} samples, {len(LEVELS)} could not be read") == 2
    told = [line for line in words.splitlines() if "skipped an unreadable validation" in line]
    assert len(told) == len(LEVELS), "each is named once, not at every evaluation"
    assert all(any(f"'key{index}'" in line for line in told) for index in LEVELS)


def test_an_open_run_on_a_whole_set_says_so(places: Places) -> None:
    assert run(places, 1, OPEN) == [0]
    assert values(places, "eval_samples") == [COUNT]
    assert [record["eval_samples"] for record in evaluations(places)] == [COUNT, COUNT]
    assert f"on {COUNT} samples\n" in ranks.said(places)


@pytest.mark.parametrize(
    ("bad", "fraction", "code"),
    [([4], 0.0001, 0), ([4, 5], 0.0001, EXIT_USAGE), (list(range(COUNT)), 1.0, EXIT_USAGE)],
    ids=["one is bad luck", "two are too many", "none is left"],
)
def test_what_an_open_run_may_leave_out_is_bounded(
    places: Places, bad: list[int], fraction: float, code: int
) -> None:
    spoil(places.data, bad)
    assert run(places, 2, OPEN, {"data": {"max_bad_fraction": fraction}}) == [code] * 2
    if code:
        require_no_claim(places)
        assert "spec.run.data.max_bad_fraction" in ranks.said(places)


@pytest.mark.parametrize("division", ["closed", "open"])
def test_a_loss_that_is_no_number_on_readable_samples_is_divergence(
    places: Places, division: str
) -> None:
    write_encoded(places.data, validation_value=1e30)  # finite, but its square is not
    changes = {"logging": {"mlperf": {"division": division}}, "evaluation": {"target_loss": 1e6}}
    assert run(places, 2, changes) == [EXIT_DIVERGED] * 2
    assert "the evaluation loss is nan at step 1" in ranks.said(places)
    require_no_claim(places)


@pytest.mark.parametrize("size", [1, 2])
def test_pictures_are_held_to_the_same(tmp_path: Path, size: int) -> None:
    for part in ("train", "validation"):
        write_pictures(tmp_path / part, COUNT, timesteps=part == "validation")
    cut_pictures(tmp_path / "validation", ["000000000", "000000020"])
    places = Places(tmp_path / "output", tmp_path, write_encoders(tmp_path))
    assert run(places, size, PICTURES) == [EXIT_USAGE] * size
    assert f"2 of {COUNT} validation samples could not be read" in ranks.said(places)
    assert "key '000000020': its image is unreadable" in ranks.said(places)
    require_no_claim(places)
    more = {"data": {"max_bad_fraction": 0.2}}
    again = Places(tmp_path / "again", tmp_path, tmp_path)
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
