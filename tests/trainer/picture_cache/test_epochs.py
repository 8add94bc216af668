"""A training of epochs on pictures: how many steps it has, and that its samples stay those it began with."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.trainer import ranks
from tests.trainer.outputs import losses
from tests.trainer.picture_cache import folders
from tests.trainer.picture_cache.folders import config, file_of, noise, write_pictures
from tests.trainer.tiny_encoders import SIDE

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.resolve import merge
from fluxtrain.data.pictures.dataset import PictureDataset
from fluxtrain.errors import DataError
from fluxtrain.parallel.distributed import World

COUNT, BATCH, REPEATS = 5, 4, 3
EPOCHS: dict[str, Any] = {"data": {"repeats": REPEATS}, "schedule": {"epochs": 3}}
STEPS = -(-3 * REPEATS * COUNT // BATCH)


@pytest.fixture
def paths(tmp_path: Path, models: Path) -> RunPaths:
    folder = write_pictures(tmp_path / "data/pictures", COUNT)
    (folder / "broken.png").write_bytes(b"no picture")
    return RunPaths(tmp_path / "out", tmp_path / "data", models)


def train(paths: RunPaths, size: int = 1, **changes: Any) -> str:
    """Train for three epochs, with ``changes``; return what was printed."""
    folders.train(config(**merge(EPOCHS, changes)), paths, size)
    return ranks.output_of(paths)


def test_a_run_goes_on_with_the_pictures_that_it_began_with(paths: RunPaths) -> None:
    told = train(paths, schedule={"epochs": 2})
    assert "2 epochs of 15 samples are 8 steps" in told
    page = (paths.output / "gallery.html").read_text()
    assert "<dt>epoch</dt><dd>2 of 2</dd>" in page

    folder = paths.data / "pictures"
    (folder / "aa.png").write_bytes(file_of(noise(SIDE, SIDE), "PNG"))
    (folder / "broken.png").write_bytes(file_of(noise(SIDE, SIDE, seed=1), "PNG"))  # repaired
    (folder / "001.jpg").unlink()
    (folder / "002.txt").write_text("something else")
    told = train(paths, size=2)
    changed = "pictures: 1 added, 1 removed, 1 with another caption since the run began"
    assert changed in told
    assert "pictures: 1 of those that were skipped are mended since the run began" in told
    assert "3 epochs of 15 samples are 12 steps" in told
    assert max(losses(paths.output)) == STEPS
    ledgers = [path.read_text().splitlines() for path in paths.output.glob("ledger/rank_*.jsonl")]
    used = Counter(i for lines in ledgers for line in lines for i in json.loads(line)["indices"])
    assert sorted(used) == [*range(REPEATS * COUNT)]
    assert sorted(used.values()) == [3] * 12 + [4] * 3  # the last batch has three of the next epoch


def test_pictures_whose_encodings_are_lost_are_encoded_again_or_asked_for(paths: RunPaths) -> None:
    run, folder = config(**EPOCHS), paths.data / "pictures"
    paths.output.mkdir()

    def start(is_new: bool = False) -> PictureDataset:
        work = folders.cache(run, paths, World.alone(), is_new)
        return work.open(run, paths.output)[0]

    begun = start(is_new=True)
    for entry in begun.entries:
        entry.latents[0].unlink()
    (folder / "000.txt").write_text("something else")
    assert start().entries == begun.entries

    begun.entries[1].latents[0].unlink()
    (folder / "001.jpg").write_bytes(file_of(noise(SIDE, SIDE), "JPEG"))
    with pytest.raises(DataError, match=r"001.jpg: changed since the run began, and its encodings"):
        start()
    (folder / "001.jpg").unlink()
    with pytest.raises(DataError, match=r"001.jpg: missing, and so are its encodings in"):
        start()
    (paths.output / "training_set.json").write_text('{"format": 1}')
    with pytest.raises(
        DataError, match=r"training_set.json: cannot be read .*order of the samples"
    ):
        start()
    assert len(start(is_new=True)) == REPEATS * (COUNT - 1)
