"""Pictures in Parquet files: what Hugging Face writes is read, damaged and hostile files are refused."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tests.trainer.data.formats.tar_files import image, pixels

from fluxtrain.contract.run.data import TableConfig
from fluxtrain.data.pictures.faults import EMPTY, Faults, num_lost, read_faults
from fluxtrain.data.pictures.folder import list_pictures
from fluxtrain.data.pictures.tables import files_of_split, write_out
from fluxtrain.errors import ConfigError, DataError, FluxtrainError


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    return path


def read(path: Path, folder: Path, **columns: str) -> dict[str, str]:
    write_out(path, folder / "table", TableConfig(**columns))
    return {picture.name: picture.caption for picture in list_pictures(folder).pictures}


def test_what_hugging_faces_library_writes_is_read(tmp_path: Path) -> None:
    content = {"picture": [Image.fromarray(pixels(i)) for i in range(3)], "text": ["a", "b", None]}
    features = datasets.Features({"picture": datasets.Image(), "text": datasets.Value("string")})
    datasets.Dataset.from_dict(content, features=features).to_parquet(tmp_path / "t.parquet")
    assert read(tmp_path / "t.parquet", tmp_path / "out") == {
        "table/00000000.png": "a",
        "table/00000001.png": "b",
        "table/00000002.png": "",
    }
    with Image.open(tmp_path / "out/table/00000001.png") as found:
        assert (np.asarray(found) == pixels(1)).all()


def test_columns_are_found_or_chosen(tmp_path: Path) -> None:
    row = {"id": 3, "jpg": image(1, "jpg"), "webp": image(2, "webp"), "prompt": "p", "alt": "other"}
    path = written(tmp_path / "t.parquet", [row])
    assert read(path, tmp_path / "a") == {"table/00000000.jpg": "p"}
    chosen = read(path, tmp_path / "b", image_column="webp", caption_column="alt")
    assert chosen == {"table/00000000.webp": "other"}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"image_column": "id"}, r"table\.image_column: got 'id'; no such column holds bytes; there are id"),
        ({"image_column": "no"}, r"table\.image_column: got 'no'; no such column holds bytes"),
        ({"caption_column": "no"}, r"table\.caption_column: got 'no'; there is no such column; .* text"),
    ],
)  # fmt: skip
def test_a_missing_column_is_named_with_those_there_are(
    tmp_path: Path, columns: dict[str, str], message: str
) -> None:
    path = written(tmp_path / "t.parquet", [{"id": 3, "png": image(), "text": "a"}])
    with pytest.raises(ConfigError, match=rf"^spec\.run\.data\.{message}"):
        read(path, tmp_path / "out", **columns)


def test_rows_that_cannot_be_used_are_left_out_and_named(tmp_path: Path) -> None:
    pictures = [{"bytes": image()}, {"bytes": None}, {"bytes": b""}, {"bytes": b"<html>"}, None]
    pictures.append({"bytes": image(1)})
    captions = ["a", "b", "c", "d", "e", "x" * 70_000]
    rows = [{"image": p, "text": t} for p, t in zip(pictures, captions, strict=True)]
    path = written(tmp_path / "t.parquet", rows)
    assert list(read(path, tmp_path / "out")) == ["table/00000000.png"]
    assert read_faults(tmp_path / "out") == {
        "table/row 1": "it has no bytes of a picture",
        "table/row 2": "it has no bytes of a picture",
        "table/row 3": "no picture in a format that is read (PNG, JPEG, WebP ...)",
        "table/row 4": "it has no bytes of a picture",
        "table/row 5": "its caption has more than 65536 characters",
    }


def test_captions_that_are_bytes_are_of_the_codec(tmp_path: Path) -> None:
    rows = [{"png": image(), "text": text} for text in (b"red", "红色的汽车".encode("gbk"))]
    path = written(tmp_path / "t.parquet", rows)
    assert list(read(path, tmp_path / "a", image_column="png")) == ["table/00000000.png"]
    said = "its caption is not UTF-8, likely gbk"
    assert read_faults(tmp_path / "a") == {"table/row 1": said}
    write_out(path, tmp_path / "b/table", TableConfig(image_column="png"), encoding="gbk")
    found = list_pictures(tmp_path / "b", encoding="gbk").pictures
    assert [picture.caption for picture in found] == ["red", "红色的汽车"]


def test_of_many_faults_the_rest_is_counted(tmp_path: Path) -> None:
    faults = Faults()
    for number in range(5000):
        faults.add(f"row {number}", "it has no bytes of a picture")
    (tmp_path / "t").mkdir()
    faults.write(tmp_path / "t")
    found = read_faults(tmp_path)
    assert (len(found), num_lost(found)) == (1001, 5000)
    assert num_lost({"s/'a.txt'": "twice", "p/a.png": "x", "p#2/a.png": "x"}) == 1
    assert (
        num_lost(
            {"s/": "holds no pictures; row 0: x", "t/": EMPTY, "t/row 0": "x", "to/": "a link"}
        )
        == 2
    )


def test_a_table_without_pictures_is_left_out_and_named(tmp_path: Path) -> None:
    path = written(tmp_path / "t.parquet", [{"text": "a"}])
    with pytest.raises(ConfigError, match=r"image_column: got null; no such .* there are text"):
        read(path, tmp_path / "out")
    path = written(tmp_path / "t.parquet", [{"png": b"x", "text": "a"}])
    write_out(path, tmp_path / "out2/t", TableConfig())
    said = read_faults(tmp_path / "out2")
    assert said["t/"].startswith("holds no pictures; row 0: no picture in a format")
    pq.write_table(pq.read_table(path).slice(0, 0), path)  # of no rows
    write_out(path, tmp_path / "out3/t", TableConfig())
    assert read_faults(tmp_path / "out3") == {"t/": "holds no pictures"}


def test_any_damage_is_answered_and_leaves_nothing(tmp_path: Path) -> None:
    whole = written(tmp_path / "t.parquet", [{"png": image(i), "text": "a"} for i in range(5)])
    content, chance = whole.read_bytes(), np.random.default_rng(0)
    damaged = [content[: len(content) // 2], b"", b"<html>", b"PAR1" * 9]
    for _ in range(40):
        changed = bytearray(content)
        changed[chance.integers(len(content))] ^= 1 << int(chance.integers(8))
        damaged.append(bytes(changed))
    for number, each in enumerate(damaged):
        path = tmp_path / "damaged.parquet"
        path.write_bytes(each)
        folder, said = tmp_path / str(number), ""
        try:
            assert read(path, folder)
        except FluxtrainError as error:
            said = str(error)
        assert "\n" not in said
        assert (folder / "table").exists() == (said == "")


def test_a_page_that_becomes_much_larger_is_refused(tmp_path: Path) -> None:
    zeros = [{"image": {"bytes": bytes(64 << 20)}, "text": "a"}]
    table = pa.Table.from_pylist(zeros)
    pq.write_table(table, tmp_path / "t.parquet", compression="zstd", use_dictionary=False)
    with pytest.raises(DataError, match=r"is not Parquet \(a page of \d+ bytes claims to become"):
        read(tmp_path / "t.parquet", tmp_path / "out")


FILES = ["data/train-00000-of-00002.parquet", "data/test-00000-of-00001.parquet", "README.parquet"]


@pytest.mark.parametrize(
    ("names", "split", "expected"),
    [
        (FILES, None, FILES[:1]),
        (FILES, "test", FILES[1:2]),
        (["en/train/0000.parquet", "en/validation/0000.parquet"], None, ["en/train/0000.parquet"]),
        (["part-1.parquet", "validation.parquet"], None, ["part-1.parquet"]),
        (["part-1.parquet", "part-2.parquet"], None, ["part-1.parquet", "part-2.parquet"]),
        (["validation.parquet"], None, ["validation.parquet"]),
        (
            ["trainer.parquet", "constraint.parquet"],
            None,
            ["trainer.parquet", "constraint.parquet"],
        ),
    ],
)
def test_the_files_of_a_split(names: list[str], split: str | None, expected: list[str]) -> None:
    assert files_of_split(names, split) == set(expected)


def test_pictures_as_plain_bytes_in_a_buffer(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"image": pa.array([image()], pa.large_binary())}), buffer)
    (tmp_path / "t.parquet").write_bytes(buffer.getvalue())
    assert read(tmp_path / "t.parquet", tmp_path / "out") == {"table/00000000.png": ""}
