"""MLCommons' cleaned CC12M: images in Arrow streams equal those in tars; damaged streams are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from tests.trainer.data.formats.encoded_sets import save_stream
from tests.trainer.data.small_runs import batches, image_run
from tests.trainer.tiny_encoders import png, small_image

from fluxtrain.contract.process import RunPaths
from fluxtrain.data.dataset import ImageBatch
from fluxtrain.data.images import TarImages
from fluxtrain.errors import DataError


def save_published(prepared: RunPaths, folder: Path) -> None:
    """Write the training images as MLCommons publishes the cleaned CC12M: Hugging Face's Image and text."""
    datasets.disable_progress_bars()
    tars = TarImages(prepared.data / "train")
    columns = {
        "png": [png(small_image(index)) for index in range(len(tars))],
        "txt": [tars.caption(index) for index in range(len(tars))],
        "__key__": [tars.key(index) for index in range(len(tars))],
        "width": [32] * len(tars),
    }
    published = datasets.Dataset.from_dict(columns).cast_column("png", datasets.Image())
    published.save_to_disk(str(folder), num_shards=2)


def test_published_images_equal_those_of_the_tars(prepared: RunPaths, tmp_path: Path) -> None:
    save_published(prepared, tmp_path / "train")
    from_arrow = batches(image_run(data={"num_workers": 2}), tmp_path)
    from_tars = batches(image_run(), prepared.data)
    for ours, theirs in zip(from_arrow, from_tars, strict=True):
        assert isinstance(ours, ImageBatch)
        assert isinstance(theirs, ImageBatch)
        assert torch.equal(ours.images, theirs.images)
        assert (ours.captions, ours.faults) == (theirs.captions, ())


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"png": ["text"], "title": ["a"]}, "columns png and txt are needed; it has png, title"),
        ({"png": [3], "txt": ["a"]}, "column 'png' is int64, not an image's bytes"),
    ],
)
def test_streams_without_images_are_refused(
    tmp_path: Path, columns: dict[str, Any], message: str
) -> None:
    save_stream(tmp_path / "train" / "a.arrow", pa.table(columns))
    with pytest.raises(DataError, match=message):
        next(batches(image_run(), tmp_path))


def test_random_damage_raises_nothing_but_data_error(prepared: RunPaths, tmp_path: Path) -> None:
    save_published(prepared, tmp_path / "train")
    path, rng = tmp_path / "train/data-00000-of-00002.arrow", np.random.default_rng(0)
    content, num_refused = path.read_bytes(), 0
    for _ in range(60):
        damaged = bytearray(content)
        for place in rng.integers(0, 4000, 8):  # where the schema and the offsets are
            damaged[place] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            next(batches(image_run(), tmp_path))
        except DataError:
            num_refused += 1
    assert num_refused > 0
