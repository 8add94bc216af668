"""Data sets that several modules train on."""

from __future__ import annotations

import pytest
from tests.trainer import ranks
from tests.trainer.data.formats.encoded_sets import FOREIGN
from tests.trainer.tiny_encoders import config, write_encoders, write_images

from fluxtrain.contract.process import RunPaths
from fluxtrain.data.formats.convert import convert
from fluxtrain.prepare.preprocess import preprocess


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """Return roots with images, encoders, and the preprocessed samples in every layout."""
    root = tmp_path_factory.mktemp("prepared")
    write_images(root / "train", 37)
    write_images(root / "validation", 16, timesteps=True, first=100)
    write_encoders(root)
    paths = RunPaths(root / "out", root, root)
    run = config(task="preprocess", encoders={"precision": "bfloat16"})
    assert ranks.finish(preprocess, run, paths) == [0], ranks.output_of(paths)
    for layout in FOREIGN:
        for part in ("train", "validation"):
            convert(root / "preprocessed" / part, root / layout / part, layout, shard_size=10)
    (root / "shards").symlink_to(root / "preprocessed")
    return paths
