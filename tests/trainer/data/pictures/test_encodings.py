"""Captions of any codec: read if it is said, else the likely one is named, of all captions together."""

from __future__ import annotations

from pathlib import Path

import pytest

from fluxtrain.contract.model_base import validate
from fluxtrain.contract.run.data import DataConfig
from fluxtrain.data.pictures.encodings import likely_codecs
from fluxtrain.data.pictures.folder import list_pictures
from fluxtrain.errors import ConfigError, DataError

CAPTIONS: dict[str, tuple[str, ...]] = {
    "windows-1252": ("café", "Größe", "niño y señor", "l\u2019été à la plage", "crème brûlée"),
    "windows-1250": ("żółty kot na dachu", "kočka na střeše"),
    "windows-1251": ("кошка на диване", "Красная машина", "кошка"),
    "koi8-r": ("кошка на диване", "Красная машина", "кошка"),
    "gbk": ("一只坐在窗台上的黑猫", "红色的汽车", "女孩, 长发, 微笑, 蓝天"),
    "big5": ("一隻貓", "一隻坐在窗台上的黑貓", "紅色的汽車"),
    "shift_jis": ("猫の写真", "かわいい女の子", "1girl, 青い空, カメラ目線"),
    "euc-kr": ("고양이 사진", "빨간 자동차"),
    "utf-16-le": ("a cat", "一只猫", "кошка"),
    "utf-16-be": ("a cat", "一只猫"),
}  # fmt: skip


def write(folder: Path, **files: bytes) -> None:
    """Write ``files``; of their names the last underscore is the dot."""
    for name, content in files.items():
        (folder / ".".join(name.rsplit("_", 1))).write_bytes(content)


@pytest.mark.parametrize("codec", CAPTIONS)
def test_the_likely_codec_is_named_and_reads_the_captions(tmp_path: Path, codec: str) -> None:
    for number, text in enumerate(CAPTIONS[codec]):
        write(tmp_path, **{f"{number}_png": b"", f"{number}_txt": text.encode(codec)})
    skipped = list_pictures(tmp_path, may_be_empty=True).skipped
    assert skipped == {
        f"{number}.png": f"its caption {number}.txt is not UTF-8, likely {codec}"
        for number in range(len(CAPTIONS[codec]))
    }
    listing = list_pictures(tmp_path, encoding=codec)
    assert tuple(picture.caption for picture in listing.pictures) == CAPTIONS[codec]


def test_captions_of_two_codecs_have_a_likely_one_each() -> None:
    contents = {text: text.encode("gbk") for text in CAPTIONS["gbk"]}
    others = {text: text.encode("windows-1251") for text in CAPTIONS["windows-1251"]}
    found = likely_codecs(contents | others)
    assert [found[text] for text in contents] == ["gbk"] * len(contents)
    assert [found[text] for text in others] == ["windows-1251"] * len(others)
    few = {"1": b"a caf\xe9", "2": b"a woman\xa0x", "3": "红心".encode("gbk")}
    assert likely_codecs(few) == {"1": "windows-1252", "2": "windows-1252", "3": "gbk"}
    assert likely_codecs({"": b"\x01\x02\x83\xff\xff"}) == {}


def test_a_byte_order_mark_wins_and_another_codec_is_named(tmp_path: Path) -> None:
    text = "кошка"
    write(
        tmp_path, a_png=b"", a_txt=text.encode("utf-8-sig"), b_png=b"", b_txt=text.encode("utf-16")
    )
    write(tmp_path, c_png=b"", c_txt="一只猫在".encode() + b"!")
    listing = list_pictures(tmp_path, encoding="gbk")
    assert [picture.caption for picture in listing.pictures] == [text, text]
    assert listing.skipped == {"c.png": "its caption c.txt is not gbk, likely utf-8"}


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_metadata_files_are_of_the_codec_too(tmp_path: Path, kind: str) -> None:
    row = (
        "file_name,text\na.png,{}\n"
        if kind == "csv"
        else '{{"file_name": "a.png", "text": "{}"}}\n'
    )
    text = CAPTIONS["gbk"][0]
    write(tmp_path, a_png=b"", **{f"metadata_{kind}": row.format(text).encode("gbk")})
    with pytest.raises(
        DataError, match=r"is not UTF-8, likely gbk; .* set spec.run.data.caption_encoding"
    ):
        list_pictures(tmp_path)
    (picture,) = list_pictures(tmp_path, encoding="gbk").pictures
    assert picture.caption == text


@pytest.mark.parametrize("name", ["klingon", "hex", "rot13", "undefined", "utf 9"])
def test_what_is_no_codec_of_text_is_refused_with_its_path(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^spec\.run\.data\.caption_encoding: got '.*; must be a"
    ):
        validate(DataConfig, {"images": "p", "caption_encoding": name}, "spec.run.data")


@pytest.mark.parametrize(
    "name", ["cp1252", "GBK", "latin-1", "UTF-16", "Shift_JIS", "utf8", "big5hkscs"]
)
def test_any_codec_of_text_may_be_given(name: str) -> None:
    given = {"images": "p", "caption_encoding": name}
    assert validate(DataConfig, given, "spec.run.data").caption_encoding == name
