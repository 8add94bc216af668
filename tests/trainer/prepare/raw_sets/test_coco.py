"""COCO's validation subset equals the one selected with pandas, and an unreadable image is an error."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from tests.trainer.prepare.cli_process import kill_before_each, require_success
from tests.trainer.prepare.raw_sets.raw_coco import (
    CAPTIONS,
    image_name,
    random_annotations,
    random_jpeg,
    write_captions,
    write_raw_coco,
)
from tests.trainer.ranks import made_in

from fluxtrain.data.images import TarImages
from fluxtrain.errors import ConfigError, DataError
from fluxtrain.prepare.coco import Annotation, prepare_coco, read_annotations, subset, tsv


def select_with_pandas(rows: list[dict[str, Any]], num_samples: int) -> pd.DataFrame:
    """Return the subset as the reference selects it."""
    frame = pd.DataFrame(rows)
    frame["caption"] = [caption.replace("\n", "").strip() for caption in frame["caption"]]
    frame = frame.sample(frac=1, random_state=2023).reset_index(drop=True)
    frame = frame.drop_duplicates(subset=["image_id"], keep="first")[:num_samples]
    frame = frame.sort_values(by=["id"])
    frame["timestep"] = np.arange(num_samples) % 8
    return frame


@pytest.mark.parametrize(
    ("num_images", "per_image", "num_samples"),
    [
        (8, 1, 8),
        (50, 3, 16),
        (400, 5, 400),
        pytest.param(40_504, 5, 29_696, marks=pytest.mark.slow),
    ],
)
def test_the_subset_and_its_table_equal_those_of_pandas(
    tmp_path: Path, num_images: int, per_image: int, num_samples: int
) -> None:
    rows = random_annotations(num_images, per_image)
    read = read_annotations(write_captions(tmp_path / "captions.json", rows))
    ours, expected = subset(read, num_samples), select_with_pandas(rows, num_samples)
    assert [row.image_id for row in ours] == expected["image_id"].tolist()
    assert [row.timestep for row in ours] == expected["timestep"].tolist()
    assert tsv(ours) == expected.to_csv(sep="\t", index=False, lineterminator="\n")


def test_every_timestep_is_equally_frequent_or_an_error() -> None:
    annotations = [Annotation(i, i, "x") for i in range(20)]
    assert [row.timestep for row in subset(annotations, 16)] == [0, 1, 2, 3, 4, 5, 6, 7] * 2
    with pytest.raises(ConfigError, match=r"--samples: got 12; allowed: a multiple of 8"):
        subset(annotations, 12)


def test_fewer_images_than_samples_are_an_error() -> None:
    annotations = [Annotation(i // 2, i, "x") for i in range(20)]
    with pytest.raises(DataError, match="captions of 10 images, 16 are needed"):
        subset(annotations, 16)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"annotations": 1}',
        '{"annotations": [{"id": 1, "image_id": 1}]}',
        '{"annotations": [{"id": "1", "image_id": 1, "caption": "x"}]}',
        '{"annotations": [{"id": true, "image_id": 1, "caption": "x"}]}',
        '{"annotations": [{"id": 1, "image_id": -1, "caption": "x"}]}',
        '{"annotations": [{"id": 1, "image_id": 1, "caption": null}]}',
        "[" * 100_000,
    ],
)
def test_malformed_captions_are_an_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "captions.json").write_text(text)
    with pytest.raises(DataError, match=r"captions\.json: not COCO's captions"):
        read_annotations(tmp_path / "captions.json")


def test_missing_captions_are_an_error_of_the_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--captions"):
        read_annotations(tmp_path / "nowhere.json")


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("raw")
    write_raw_coco(folder)
    return folder


def prepare(raw: Path, output: Path, **options: Any) -> dict[str, Any]:
    options = {"num_samples": 24, "shard_size": 7, "num_workers": 2, **options}
    return prepare_coco(raw / "val2014", raw / CAPTIONS, output, stream=io.StringIO(), **options)


def test_images_of_any_shape_are_resized_and_have_their_timesteps(
    raw: Path, tmp_path: Path
) -> None:
    prepare(raw, tmp_path / "set")
    rows = select_with_pandas(json.loads((raw / CAPTIONS).read_text())["annotations"], 24)
    dataset = TarImages(tmp_path / "set")
    assert len(dataset) == 24
    for i, row in enumerate(rows.itertuples()):
        assert dataset.key(i) == f"{row.image_id:012d}"
        assert dataset.caption(i) == row.caption
        with Image.open(raw / "val2014" / image_name(row.image_id)) as image:
            expected = image.resize((256, 256), Image.Resampling.BICUBIC).convert("RGB")
        assert np.array_equal(dataset.image(i).permute(1, 2, 0).numpy(), np.array(expected))
    table = (tmp_path / "set" / "val2014_30k.tsv").read_bytes()
    assert table == rows.to_csv(sep="\t", index=False, lineterminator="\n").encode()
    with tarfile.open(tmp_path / "set" / "shard_00001.tar") as tar:
        content = tar.extractfile(f"{rows.iloc[8].image_id:012d}.json")
        assert content is not None
        assert json.load(content) == {
            "id": str(rows.iloc[8].image_id),
            "caption": rows.iloc[8].caption,
            "filename": image_name(rows.iloc[8].image_id).replace(".jpg", ".png"),
            "timestep": 0,
        }


def test_the_bytes_do_not_depend_on_the_number_of_workers(raw: Path, tmp_path: Path) -> None:
    for num_workers in (1, 4):
        prepare(raw, tmp_path / f"set{num_workers}", num_workers=num_workers)
    assert made_in(tmp_path / "set1") == made_in(tmp_path / "set4")
    assert len(list(tmp_path.glob("set1/*.tar"))) == 4


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["missing", "empty", "truncated", "text"])
def test_an_unreadable_image_is_an_error(tmp_path: Path, fault: str) -> None:
    rows = select_with_pandas(write_raw_coco(tmp_path), 24)
    broken = tmp_path / "val2014" / image_name(rows.iloc[9].image_id)
    content = {"empty": b"", "truncated": broken.read_bytes()[:-400], "text": b"<html>"}
    broken.unlink()
    if fault in content:
        broken.write_bytes(content[fault])
    with pytest.raises(DataError, match=rf"1 of 24 images cannot be read(.|\n)*{broken.name}"):
        prepare(tmp_path, tmp_path / "set")
    assert not (tmp_path / "set").exists()
    broken.write_bytes(random_jpeg(1))
    assert prepare(tmp_path, tmp_path / "set")["samples"] == 24


STEPS = [
    ("os.rename", "settings.partial"),
    ("os.rename", "val2014_30k.partial"),
    ("os.rename", "set.partial"),
]


@pytest.mark.slow
def test_the_bytes_are_the_same_after_being_killed_at_any_step(raw: Path, tmp_path: Path) -> None:
    inputs = ["--images", raw / "val2014", "--captions", raw / CAPTIONS]
    options = ["--samples", 24, "--workers", 2, "--output", tmp_path / "set"]
    arguments = ["prepare", "coco", *inputs, *options]
    kill_before_each(STEPS, *arguments)
    require_success(*arguments)
    prepare(raw, tmp_path / "uninterrupted", shard_size=1000)
    assert made_in(tmp_path / "set") == made_in(tmp_path / "uninterrupted")
