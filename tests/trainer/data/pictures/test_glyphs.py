"""Captions of any codec and script: read, or named; drawn on the contact sheet."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from PIL import Image
from tests.trainer.picture_cache.folders import file_of, noise

from fluxtrain.cli import main
from fluxtrain.contract.model_base import validate
from fluxtrain.contract.run.data import DataConfig
from fluxtrain.data.pictures import inspection
from fluxtrain.data.pictures.encodings import likely_codecs
from fluxtrain.data.pictures.folder import list_pictures
from fluxtrain.data.pictures.inspection import Fonts
from fluxtrain.errors import ConfigError, DataError

CAPTION = "猫の写真"
"""Chinese and Japanese; the name of the picture is Korean."""
NAME = "고양이"


def font_of(path: Path, characters: str) -> str:
    """Write a font in which each of ``characters`` is a black square; return its path."""
    pen = TTGlyphPen(None)
    pen.moveTo((0, 0))
    for point in ((0, 800), (900, 800), (900, 0)):
        pen.lineTo(point)
    pen.closePath()
    names = {ord(char): f"u{ord(char):04X}" for char in characters}
    order = [".notdef", *names.values()]
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder(order)
    builder.setupCharacterMap(names)
    builder.setupGlyf(
        {".notdef": TTGlyphPen(None).glyph(), **dict.fromkeys(names.values(), pen.glyph())}
    )
    builder.setupHorizontalMetrics(dict.fromkeys(order, (1000, 0)))
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": path.stem, "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(path)
    return str(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / f"{NAME}.png").write_bytes(file_of(noise(64, 64), "PNG"))
    (folder / f"{NAME}.txt").write_text(f"a photo, {CAPTION}")
    return folder


def checked(folder: Path, *options: str) -> int:
    sheet = str(folder.parent / "sheet.png")
    return main(
        ["data", "check", str(folder), "--image-size", "64", "--contact-sheet", sheet, *options]
    )


def text_of(folder: Path) -> np.ndarray:
    """Return where the contact sheet is black below its only picture."""
    with Image.open(folder.parent / "sheet.png") as sheet:
        return np.asarray(sheet.convert("L"))[8 + glyphs_top() :] < 100


def glyphs_top() -> int:
    from fluxtrain.data.pictures.inspection import THUMBNAIL

    return THUMBNAIL


def test_an_installed_font_draws_what_the_usual_one_lacks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder.parent / "broken.ttf").write_bytes(b"no font")
    fonts = [
        str(folder.parent / "broken.ttf"),
        font_of(folder.parent / "LastResort.ttf", CAPTION + NAME),
        font_of(folder.parent / "Korean.ttf", NAME),
        font_of(folder.parent / "Chinese.ttf", CAPTION),
    ]
    monkeypatch.setattr(inspection, "installed_fonts", lambda: fonts)
    assert checked(folder) == 0
    assert "no font" not in capsys.readouterr().out
    assert Fonts(11, [CAPTION, NAME, "a"]).lacking == ""
    black = text_of(folder)
    assert black[:14].sum() > 3 * 60  # the three squares of the name
    assert black[14:].sum() > 4 * 60


def test_what_no_font_has_is_counted_and_told_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inspection, "installed_fonts", lambda: [])
    assert checked(folder) == 0
    said = capsys.readouterr().out
    assert said.count("no font here has") == 1
    assert (
        "no font here has の U+306E, 写 U+5199, 猫 U+732B, 真 U+771F, 고 U+ACE0 and 2 more" in said
    )
    fonts = Fonts(11, [CAPTION, f"{NAME}.png", "a b️\N{ZERO WIDTH JOINER}é"])
    assert fonts.drawable(f"{NAME}.png") == "[3 characters].png"
    assert fonts.drawable(f"a 猫, {CAPTION}") == "a [1 character], [4 characters]"
    assert checked(folder, "--json") == 0
    assert json.loads(capsys.readouterr().out)["not_drawn"] == "の写猫真고양이"


def test_the_fonts_of_this_machine_are_used() -> None:
    others = inspection.installed_fonts()
    has = {
        char for path in others for char in CAPTION if char in inspection._characters(Path(path))
    }
    assert Fonts(11, [CAPTION]).lacking == "".join(sorted(set(CAPTION) - has))


def test_a_long_caption_without_spaces_has_two_lines() -> None:
    from fluxtrain.data.pictures.inspection import _wrapped

    first, second = _wrapped(Fonts(11, []), "x" * 60, lines=2)
    assert first + second == "x" * 60
    assert len(first) > 15


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
