"""One rank opens the files of the data; the others open none before they read samples."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.trainer import ranks

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.data import Layout
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.dataset import Encodings
from fluxtrain.data.formats.convert import make_writer
from fluxtrain.data.shards import Sample
from fluxtrain.data.sources import Sources, open_sources, write_empty_text
from fluxtrain.errors import EXIT_USAGE, DataError
from fluxtrain.parallel.distributed import World, process_group
from fluxtrain.train import sources as module
from fluxtrain.train.sources import shared_sources

SAMPLES, PER_FILE, RANKS = 12, 2, 3
FILES = SAMPLES // PER_FILE


def make_config(**changes: Any) -> RunConfig:
    data = {"source": "encoded", "text_length": 3, "latent_size": 2}
    model = {"context_in_dim": 5, "vec_in_dim": 6, "in_channels": 16}
    return resolve({"preset": "micro", "data": data, "model": model, **changes})


def sample(i: int) -> Sample:
    rng = torch.Generator().manual_seed(i)
    shapes = {"txt": (3, 5), "vec": (6,), "mean": (4, 2, 2), "logvar": (4, 2, 2)}
    drawn = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    return Sample(f"key-{i}", "", **drawn, timestep=i % 8)


def write_data(root: Path, layout: Layout) -> None:
    for part in ("train", "validation"):
        (root / part).mkdir(parents=True)
        with make_writer(layout, root / part, SAMPLES, PER_FILE, timesteps=True) as writer:
            writer.add_all(sample(i) for i in range(SAMPLES))
    write_empty_text(root / "empty.safetensors", torch.zeros(3, 5), torch.zeros(6))


def counting(root: Path) -> Counter[str]:
    """Return counts of files opened and folders listed below ``root``, from now on, in this process."""
    seen = Counter[str]()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir") and str(root) in str(arguments[0]):
            seen[event] += 1

    sys.addaudithook(hook)
    return seen


def refuse(config: RunConfig, data_root: Path) -> Sources:
    raise AssertionError("a rank that is not the first one opens the data")


def open_and_read(config: RunConfig, paths: RunPaths, world: World) -> None:
    """Open the data, then read a sample; write what this rank did until then."""
    seen = counting(paths.data)
    with process_group() as joined:
        local = joined.rank % 2  # ranks 0 and 1 are one node, 2 another
        if joined.rank:  # no audit hook sees what Arrow opens
            module.open_sources = refuse  # type: ignore[assignment]
        sources = shared_sources(config, paths, replace(joined, local_rank=local))
        validation_times = sources.validation.timesteps(np.arange(SAMPLES)).tolist()
        opened = dict(seen)
        out = Encodings.empty(1, sources.train.shape)  # type: ignore[union-attr]
        faults = sources.train.read(np.array([7]), out, np.array([False]))  # type: ignore[call-arg, arg-type]
        assert faults == [None]
        assert torch.equal(out.vec[0].bfloat16(), sample(7).vec.bfloat16())
        (paths.output / f"opened_{joined.rank}").write_text(json.dumps([opened, validation_times]))


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "output", tmp_path / "data", tmp_path)


def run(paths: RunPaths, size: int = RANKS, **changes: Any) -> list[int | None]:
    return ranks.finish(open_and_read, make_config(**changes), paths, size)


@pytest.mark.parametrize("layout", ["shards", "arrow", "parquet", "webdataset"])
def test_only_rank_0_opens_files_before_samples_are_read(paths: RunPaths, layout: Layout) -> None:
    write_data(paths.data, layout)
    assert run(paths) == [0] * RANKS, ranks.output_of(paths)
    told = [json.loads((paths.output / f"opened_{rank}").read_text()) for rank in range(RANKS)]
    opened = [counts for counts, _ in told]
    assert opened[0]["open"] >= (2 * FILES if layout in ("shards", "webdataset") else 1)
    assert opened[1] == {}
    assert opened[2] == {"os.listdir": 2}  # another node looks whether it has the files
    assert all(times == [i % 8 for i in range(SAMPLES)] for _, times in told)


def test_a_file_that_rank_0_cannot_open_ends_all_ranks(paths: RunPaths) -> None:
    write_data(paths.data, "shards")
    os.truncate(paths.data / "train" / "shard_000003.safetensors", 100)
    assert run(paths) == [EXIT_USAGE] * RANKS
    for rank in range(RANKS):
        assert "shard_000003.safetensors: not a whole safetensors file" in ranks.output_of(
            paths, rank
        )


def test_data_of_another_shape_ends_all_ranks(paths: RunPaths) -> None:
    write_data(paths.data, "shards")
    data = {"source": "encoded", "text_length": 4, "latent_size": 2}
    assert run(paths, 2, data=data) == [EXIT_USAGE] * 2
    for rank in range(2):
        assert "spec.run.data.text_length: got 4; the data in" in ranks.output_of(paths, rank)


def test_a_node_without_a_file_names_it(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    write_data(paths.data, "shards")
    config = make_config()
    sources = open_sources(config, paths.data)
    (paths.data / "train" / "shard_000004.safetensors").unlink()
    (paths.data / "train" / "shard_000005.safetensors").unlink()
    monkeypatch.setattr(World, "from_main", lambda self, make: sources)  # as seen on another node
    with pytest.raises(
        DataError, match=r"shard_000004.safetensors and 1 more: missing on this node"
    ):
        shared_sources(config, paths, World(8, 0, 16, ranks.CPU, 8, 2))
