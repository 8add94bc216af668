"""Names and captions of any script on the contact sheet: with a font that has them, and without one."""

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
from fluxtrain.data.pictures import inspection
from fluxtrain.data.pictures.inspection import Fonts

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
