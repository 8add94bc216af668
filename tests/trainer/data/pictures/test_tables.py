"""Pictures in Parquet files and WebDataset tars: what the libraries write is read, hostile files are not."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset
from PIL import Image
from tests.trainer.data.formats.tar_files import image, pixels, tar

from fluxtrain.contract.run.data import TableConfig
from fluxtrain.data.pictures.faults import EMPTY, LEFT_OUT, Faults, num_lost, read_faults
from fluxtrain.data.pictures.folder import list_pictures
from fluxtrain.data.pictures.tables import files_of_split, unpack, write_out
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


@pytest.mark.slow
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


def write(path: Path, *members: tuple[str, bytes], **fields: Any) -> Path:
    path.write_bytes(tar(*members, **fields))
    return path


def unpacked(path: Path, folder: Path) -> dict[str, str]:
    unpack(path, folder / "shard")
    return {picture.name: picture.caption for picture in list_pictures(folder).pictures}


def test_what_webdataset_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "s-0.tar"
    with webdataset.TarWriter(str(path)) as file:
        file.write({"__key__": "a", "png": image(1), "txt": "a text"})
        file.write({"__key__": "below/b", "jpg": image(2, "jpg"), "json": {"caption": "in JSON"}})
        file.write({"__key__": "c.d", "webp": image(3, "webp")})
        file.write({"__key__": "e", "jpeg": image(4, "jpeg"), "json": ["no object"], "cls": 3})
    assert unpacked(path, tmp_path / "out") == {
        "shard/a.png": "a text",
        "shard/e.jpeg": "",
        "shard/below/b.jpg": "in JSON",
    }
    assert (tmp_path / "out/shard/a.png").read_bytes() == image(1)
    assert (tmp_path / "out/shard/a.png").stat().st_mtime_ns == 0


def test_members_of_a_sample_need_not_follow_each_other(tmp_path: Path) -> None:
    path = write(tmp_path / "s.tar", ("./a.txt", b"an a"), ("b.png", image()), ("./a.png", image()))
    assert unpacked(path, tmp_path / "out") == {"shard/a.png": "an a", "shard/b.png": ""}


HOSTILE: dict[str, tuple[tuple[str, bytes], str]] = {
    "absolute": (("/tmp/evil.png", b"x"), "its name leads out of the tar"),
    "upwards": (("a/../../evil.png", b"x"), "its name leads out of the tar"),
    "a control character": (("evil\n.png", b"x"), "its name has control characters"),
    "a long part": (("e" * 300 + ".png", b"x"), "a part of its name has more than 200 bytes"),
    "a long text": (("good.txt", b"x" * (1 << 21)), "it has 2097152 bytes, at most"),
    "twice": (("good.png", b"x"), "there are several of this name"),
    "only a suffix": (("below/.png", b"x"), "it has no name before its suffix"),
    "twice but for capitals": (("good.PNG", b"x"), "there are several of this name"),
    "another format": (("b.heic", b"x"), ".heic is not read; convert it to PNG, JPEG or WebP"),
    "a film": (("b.v2.MP4", b"x"), ".mp4 is not read; convert it to PNG, JPEG or WebP"),
    "two pictures": (("good.jpg", b"x"), "the sample has a picture .png already"),
    "below a file": (("good.png/a.png", b"x"), "its name is that of a folder too"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_member_is_left_out_and_named(tmp_path: Path, name: str) -> None:
    member, reason = HOSTILE[name]
    path = write(tmp_path / "s.tar", ("good.png", image(1)), member)
    assert list(unpacked(path, tmp_path / "out")) == ["shard/good.png"]
    assert (tmp_path / "out/shard/good.png").read_bytes() == image(1)
    ((_, said),) = read_faults(tmp_path / "out").items()
    assert reason in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "s.tar"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_links_and_pipes_are_left_out(tmp_path: Path, kind: bytes) -> None:
    path = write(tmp_path / "s.tar", ("link.png", b""), type=kind, linkname="/etc/passwd")
    unpack(path, tmp_path / "out/s")
    said = read_faults(tmp_path / "out")
    assert said["s/"].startswith("holds no pictures; 'link.png': it is a ")
    assert said["s/'link.png'"].startswith("it is a ")


def test_parts_beside_a_picture_and_files_of_systems_are_no_lost_pictures(tmp_path: Path) -> None:
    members = [("x.png", image()), ("x.mask.png", image()), ("y.v2.png", image())]
    members += [(name, b"x") for name in (".x.png", "._x.png", "a/._y.txt", "Thumbs.db", "x.heic")]
    members += [("@eaDir/x.png/SYNOFILE_THUMB_M.png", image()), ("__MACOSX/y.v2.png", b"")]
    unpack(write(tmp_path / "s.tar", *members), tmp_path / "out/s")
    assert list(read_faults(tmp_path / "out")) == ["s/'y.v2.png'"]
    left_out = read_faults(tmp_path / "out", LEFT_OUT)
    names = (
        "._x.png",
        ".x.png",
        "Thumbs.db",
        "__MACOSX/y.v2.png",
        "a/._y.txt",
        "x.heic",
        "x.mask.png",
    )
    assert list(left_out) == [f"s/{name!r}" for name in names]
    listing = list_pictures(tmp_path / "out")
    assert [picture.name for picture in listing.pictures] == ["s/x.png"]
    assert list(listing.left_out) == ["s/@eaDir/"]


def test_captions_in_json_are_of_the_codec(tmp_path: Path) -> None:
    text = json.dumps({"text": "红色的汽车"}, ensure_ascii=False).encode("gbk")
    path = write(tmp_path / "s.tar", ("a.png", image()), ("a.json", text), ("b.png", image()))
    assert unpacked(path, tmp_path / "out") == {"shard/b.png": ""}
    ((name, reason),) = read_faults(tmp_path / "out").items()
    assert (name, reason) == ("shard/'a.png'", "the caption in its JSON is not UTF-8, likely gbk")
    unpack(path, tmp_path / "gbk/s", encoding="gbk")
    found = list_pictures(tmp_path / "gbk", encoding="gbk").pictures
    assert [picture.caption for picture in found] == ["红色的汽车", ""]


JSON = {
    "{bad": "the caption in its JSON cannot be read (Expecting property name",
    "[" * 100_000: "the caption in its JSON cannot be read (nested too deeply)",
    '{"text": 3}': "the caption in its JSON is 3, not a text",
    '{"caption": null, "prompt": ["a", "b"]}': "the caption in its JSON is ['a', 'b'], not a text",
}


@pytest.mark.parametrize("text", JSON, ids=range(len(JSON)))
def test_a_picture_with_a_wrong_caption_in_json_is_skipped(tmp_path: Path, text: str) -> None:
    members = [("a.png", image()), ("a.json", text.encode()), ("b.png", image())]
    members += [("b.json", b'{"text": null, "caption": "b", "width": 8}')]
    found = unpacked(write(tmp_path / "s.tar", *members), tmp_path / "out")
    assert found == {"shard/b.png": "b"}
    ((name, reason),) = read_faults(tmp_path / "out").items()
    assert name == "shard/'a.png'"
    assert reason.startswith(JSON[text])


def test_an_empty_tar_is_left_out_and_named(tmp_path: Path) -> None:
    unpack(write(tmp_path / "s.tar"), tmp_path / "out/s")
    assert read_faults(tmp_path / "out") == {"s/": "holds no pictures"}


def test_a_tar_that_is_not_whole_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    whole = write(tmp_path / "s.tar", ("a.png", image(1)), ("b.png", image(2))).read_bytes()
    for content in (whole[:900], whole[:1200], b"", b"<html>", b"\x1f\x8b" + bytes(600)):
        path = tmp_path / "cut.tar"
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"cut\.tar: not a whole tar \("):
            unpack(path, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_a_stop_leaves_nothing_and_the_next_call_finishes(tmp_path: Path) -> None:
    path = write(tmp_path / "s.tar", ("a.png", image(1)), ("b.png", image(2)))

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        unpack(path, tmp_path / "out/shard", stop)
    assert not (tmp_path / "out/shard").exists()
    assert list(unpacked(path, tmp_path / "out")) == ["shard/a.png", "shard/b.png"]
