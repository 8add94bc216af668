"""A rank's file of a checkpoint: what torch's own writer would write, and its checksums."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from fluxtrain.runtime import files
from fluxtrain.state.checkpoint import ShardWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
STATE = {"model.weight": torch.randn(300, 70), "optimizer.exp_avg.weight": torch.randn(300, 70)}


def metadata(folder: Path) -> dict[str, object]:
    (path,) = folder.glob("*.safetensors")
    with safe_open(path, framework="pt") as file:
        values = dict(file.metadata())
        return {**values, "DCP_SHARDING_INFO": json.loads(values["DCP_SHARDING_INFO"])}


def test_the_file_is_that_of_torchs_writer(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    writer = ShardWriter(ours)
    dcp.save(STATE, storage_writer=writer)
    dcp.save(STATE, storage_writer=HuggingFaceStorageWriter(str(theirs), save_distributed=True))
    assert [path.name for path in ours.iterdir()] == [path.name for path in theirs.iterdir()]
    assert metadata(ours) == metadata(theirs)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}
    dcp.load(loaded, storage_reader=HuggingFaceStorageReader(str(ours)))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in STATE.items())


def test_the_checksums_are_those_of_the_file(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path)
    dcp.save(STATE, storage_writer=writer)
    (path,) = tmp_path.glob("*.safetensors")
    assert writer.sums == {path.name: files.sums_of(path.read_bytes())}
