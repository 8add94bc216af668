"""WebDataset tars as folders of pictures: what the library writes is read, what is hostile is left out."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import webdataset
from tests.trainer.data.formats.tar_files import image

from fluxtrain.data.pictures.faults import LEFT_OUT, read_faults
from fluxtrain.data.pictures.folder import list_pictures
from fluxtrain.data.pictures.tables import unpack
from fluxtrain.errors import DataError


def write(path: Path, *members: tuple[str, bytes], **fields: Any) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            for field, value in fields.items():
                setattr(info, field, value)
            tar.addfile(info, io.BytesIO(content))
    return path


def unpacked(tar: Path, folder: Path) -> dict[str, str]:
    unpack(tar, folder / "shard")
    return {picture.name: picture.caption for picture in list_pictures(folder).pictures}


def test_what_webdataset_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "s-0.tar"
    with webdataset.TarWriter(str(path)) as tar:
        tar.write({"__key__": "a", "png": image(1), "txt": "a text"})
        tar.write({"__key__": "below/b", "jpg": image(2, "jpg"), "json": {"caption": "in JSON"}})
        tar.write({"__key__": "c.d", "webp": image(3, "webp")})
        tar.write({"__key__": "e", "jpeg": image(4, "jpeg"), "json": ["no object"], "cls": 3})
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
