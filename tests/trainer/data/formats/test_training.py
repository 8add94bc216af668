"""Training reads equal batches, and has equal losses, from every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.data.formats.encoded_sets import FOREIGN, LAYOUTS
from tests.trainer.data.small_runs import batches, encoded_run, train

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.data import Layout
from fluxtrain.data.loader import evaluation_batches
from fluxtrain.data.sources import open_source
from fluxtrain.launch.torchrun import check_before_starting

pytestmark = pytest.mark.slow


def test_losses_are_bit_equal_from_every_layout(prepared: RunPaths, tmp_path: Path) -> None:
    losses = [
        train(encoded_run(layout, data={"num_workers": 1}), prepared, tmp_path / layout)
        for layout in LAYOUTS
    ]
    assert len(losses[0]) == 8 + 2
    assert all(each == losses[0] for each in losses)


@pytest.mark.parametrize("layout", FOREIGN)
def test_batches_are_equal_through_loader_processes(prepared: RunPaths, layout: Layout) -> None:
    def read(name: Layout) -> list[Any]:
        run = encoded_run(name, data={"num_workers": 2, "layout": name})
        source = open_source(run, prepared.data, "validation")
        train = batches(run, prepared.data, rank=1, ranks=2, micro=3, first=2)
        return [*train, *evaluation_batches(run, source, 0, 2)]

    for ours, theirs in zip(read("shards"), read(layout), strict=True):
        assert ours.faults == theirs.faults == ()
        assert list(ours.tensors()) == list(theirs.tensors())
        for name, tensor in ours.tensors().items():
            assert torch.equal(tensor, getattr(theirs, name)), name


@pytest.mark.parametrize(("layout", "slow"), [("parquet", True), ("arrow", False)])
def test_training_from_parquet_prints_the_advice_to_convert(
    prepared: RunPaths,
    tmp_path: Path,
    layout: Layout,
    slow: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = RunPaths(tmp_path, prepared.data, prepared.models)
    check_before_starting(encoded_run(layout), paths, [1])
    assert ("parquet has no random access" in capsys.readouterr().err) == slow
