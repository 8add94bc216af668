"""The digest of a data set's index: equal for copies, another for another set, compared with the config."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.small_runs import ENCODED_RUN, merge_all, write_encoded

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.sources import open_sources
from fluxtrain.errors import ConfigError
from fluxtrain.parallel.distributed import World
from fluxtrain.train.sources import index_digests, shared_sources


def make_config(**data: Any) -> RunConfig:
    return resolve(merge_all(ENCODED_RUN, {"data": data}))


def digests(root: Path, **data: Any) -> dict[str, str]:
    return index_digests(open_sources(make_config(**data), root))


def without_the_last_shard(folder: Path) -> None:
    listing = json.loads((folder / "dataset.json").read_text())
    listing["shards"].pop()
    (folder / "dataset.json").write_text(json.dumps(listing))


def in_another_order(folder: Path) -> None:
    listing = json.loads((folder / "dataset.json").read_text())
    listing["shards"].reverse()
    (folder / "dataset.json").write_text(json.dumps(listing))


@pytest.mark.parametrize("change", [without_the_last_shard, in_another_order])
def test_the_digest_is_that_of_files_and_samples(tmp_path: Path, change: Any) -> None:
    write_encoded(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    one, two = digests(tmp_path / "one"), digests(tmp_path / "two")
    assert one == two
    assert len(set(one.values()) | {len(one["train"])}) >= 2
    change(tmp_path / "two" / "train")
    changed = digests(tmp_path / "two")
    assert changed["train"] != one["train"]
    assert changed["validation"] == one["validation"]


def test_synthetic_data_have_one_by_their_number() -> None:
    first, same, other = (
        index_digests(
            open_sources(resolve({"preset": "micro", "data": {"synthetic": size}}), Path())
        )
        for size in ({}, {}, {"train_samples": 17})
    )
    assert first == same
    assert (first["train"] != other["train"], first["validation"]) == (True, other["validation"])


def test_a_set_with_another_digest_than_the_configs_is_refused(tmp_path: Path) -> None:
    write_encoded(tmp_path)
    paths, found = RunPaths(tmp_path, tmp_path, tmp_path), digests(tmp_path)
    config = make_config(train_digest=found["train"], validation_digest=found["validation"])
    assert shared_sources(config, paths, World.alone()).digests == found
    for part in found:
        config = make_config(**{f"{part}_digest": "0" * 64})
        with pytest.raises(
            ConfigError, match=f"{part}_digest: .*; the index in {part} is {found[part]}"
        ):
            shared_sources(config, paths, World.alone())
