"""Draws the pictures of a folder, as they are trained, on one page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw
from PIL.PngImagePlugin import PngInfo

from fluxtrain.data.pictures.glyphs import Fonts
from fluxtrain.data.pictures.inspection import THUMBNAIL, Inspection, Look
from fluxtrain.data.pictures.sheet_mark import MARK
from fluxtrain.files import atomic_write_by_several

MAX_PICTURES = 400
"""More pictures would make a page of which nothing is seen."""
_PER_ROW, _GAP, _TEXT_HEIGHT, _LINE, _FONT_SIZE = 8, 8, 42, 13, 11
_INK, _FAULT, _NOTE = "#222222", "#b00020", "#9a6700"


@dataclass(frozen=True)
class ContactSheet:
    """What was drawn."""

    pictures: int
    lacking: str
    """Characters of names and captions that no font has."""


def save_contact_sheet(path: Path, inspection: Inspection) -> ContactSheet:
    """Write a PNG with the first MAX_PICTURES pictures and their captions to ``path``.

    The pictures that cannot be used are among them, with the reason. In place of characters that no font of
    this machine has is their number, and before such a name that of the picture.
    Raises OSError if it cannot be written.
    """
    looks = inspection.looks[:MAX_PICTURES]
    num_rows = max(1, -(-len(looks) // _PER_ROW))
    cell = THUMBNAIL + _GAP, THUMBNAIL + _TEXT_HEIGHT + _GAP
    columns = min(_PER_ROW, max(1, len(looks)))
    sheet = Image.new("RGB", (columns * cell[0] + _GAP, num_rows * cell[1] + _GAP), "white")
    fonts = Fonts(_FONT_SIZE, [text for look in looks for text in (look.name, _text(look)[0])])
    draw = ImageDraw.Draw(sheet)
    for number, look in enumerate(looks):
        row, column = divmod(number, _PER_ROW)
        left, top = _GAP + column * cell[0], _GAP + row * cell[1]
        _draw_thumbnail(sheet, draw, look, left, top)
        _draw_text(draw, fonts, look, number, left, top + THUMBNAIL + 2)
    info = PngInfo()
    info.add_text(*MARK)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write_by_several(path) as partial:
        sheet.save(partial, format="PNG", pnginfo=info)
    return ContactSheet(len(looks), fonts.lacking)


def _text(look: Look) -> tuple[str, str]:
    """Return what is below the name of a picture, with its colour."""
    if look.fault:
        return look.fault, _FAULT
    return (look.picture.caption, _INK) if look.picture.caption else ("no caption", _NOTE)


def _draw_thumbnail(
    sheet: Image.Image, draw: ImageDraw.ImageDraw, look: Look, left: int, top: int
) -> None:
    """Draw one picture, or a crossed box if it is not used."""
    box = (left, top, left + THUMBNAIL - 1, top + THUMBNAIL - 1)
    if look.thumbnail is None:
        draw.rectangle(box, outline=_FAULT)
        draw.line(box, fill=_FAULT)
    else:
        free = THUMBNAIL - look.thumbnail.width, THUMBNAIL - look.thumbnail.height
        sheet.paste(look.thumbnail, (left + free[0] // 2, top + free[1] // 2))


def _draw_text(
    draw: ImageDraw.ImageDraw, fonts: Fonts, look: Look, number: int, left: int, top: int
) -> None:
    """Draw the name of a picture and its caption, or why it is not used."""
    text, colour = _text(look)
    name = fonts.drawable(look.name)
    name = name if name == look.name else f"#{number + 1} {name}"
    ascent = fonts.base.getmetrics()[0]
    for row, line in enumerate([name, *_wrapped(fonts, fonts.drawable(text), lines=2)]):
        x = float(left)
        for part, font in fonts.runs(_fitted(fonts, line)):
            place = x, top + row * _LINE + ascent
            draw.text(place, part, fill=colour if row else _INK, font=font, anchor="ls")
            x += font.getlength(part)


def _wrapped(fonts: Fonts, text: str, lines: int) -> list[str]:
    """Return ``text`` in at most ``lines`` lines; the last may be too long."""
    found = [""]
    for word in text.split():
        longer = f"{found[-1]} {word}".strip()
        if len(found) < lines and found[-1] and fonts.length(longer) > THUMBNAIL:
            found.append(word)
        else:
            found[-1] = longer
    if len(found) < lines:  # a language that has no spaces
        fitting = len(found[-1])
        while fitting > 1 and fonts.length(found[-1][:fitting]) > THUMBNAIL:
            fitting -= 1
        last = found.pop()
        found += [last[:fitting], last[fitting:]] if fitting < len(last) else [last]
    return found


def _fitted(fonts: Fonts, text: str) -> str:
    """Return the beginning of ``text`` that is no wider than a thumbnail."""
    if fonts.length(text) <= THUMBNAIL:
        return text
    text = text[: THUMBNAIL // 2]
    while text and fonts.length(f"{text}…") > THUMBNAIL:
        text = text[:-1]
    return f"{text}…"
