"""Draws the pictures of a folder, as they are trained, on one page."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from fluxtrain.data.pictures.inspection import THUMBNAIL, Inspection, Look
from fluxtrain.files import atomic_write_by_several

MAX_PICTURES = 400
"""More pictures would make a page of which nothing is seen."""
_PER_ROW, _GAP, _TEXT_HEIGHT, _LINE = 8, 8, 42, 13
_INK, _FAULT, _NOTE = "#222222", "#b00020", "#9a6700"


def save_contact_sheet(path: Path, inspection: Inspection) -> int:
    """Write a PNG with the first MAX_PICTURES pictures and their captions to ``path``; return how many.

    The pictures that cannot be used are among them, with the reason. Raises OSError if it cannot be written.
    """
    looks = inspection.looks[:MAX_PICTURES]
    num_rows = max(1, -(-len(looks) // _PER_ROW))
    cell = THUMBNAIL + _GAP, THUMBNAIL + _TEXT_HEIGHT + _GAP
    columns = min(_PER_ROW, max(1, len(looks)))
    sheet = Image.new("RGB", (columns * cell[0] + _GAP, num_rows * cell[1] + _GAP), "white")
    draw, font = ImageDraw.Draw(sheet), _font()
    for number, look in enumerate(looks):
        row, column = divmod(number, _PER_ROW)
        _draw_look(sheet, draw, font, look, _GAP + column * cell[0], _GAP + row * cell[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write_by_several(path) as partial:
        sheet.save(partial, format="PNG")
    return len(looks)


def _font() -> ImageFont.FreeTypeFont:
    """Return matplotlib's font, which has Greek, Cyrillic, Arabic and more; Pillow's own has Latin alone."""
    from matplotlib import get_data_path

    return ImageFont.truetype(Path(get_data_path()) / "fonts/ttf/DejaVuSans.ttf", size=11)


def _draw_look(
    sheet: Image.Image,
    draw: ImageDraw.ImageDraw,
    font: ImageFont.ImageFont | ImageFont.FreeTypeFont,
    look: Look,
    left: int,
    top: int,
) -> None:
    """Draw one picture, its name and its caption, or why it is not used."""
    box = (left, top, left + THUMBNAIL - 1, top + THUMBNAIL - 1)
    if look.thumbnail is None:
        draw.rectangle(box, outline=_FAULT)
        draw.line(box, fill=_FAULT)
    else:
        free = THUMBNAIL - look.thumbnail.width, THUMBNAIL - look.thumbnail.height
        sheet.paste(look.thumbnail, (left + free[0] // 2, top + free[1] // 2))
    text, colour = look.picture.caption, _INK
    if look.fault:
        text, colour = look.fault, _FAULT
    elif not text:
        text, colour = "no caption", _NOTE
    lines = [look.name, *_wrapped(draw, font, text, lines=2)]
    for number, line in enumerate(lines):
        fitted = _fitted(draw, font, line)
        place = (left, top + THUMBNAIL + 2 + number * _LINE)
        draw.text(place, fitted, fill=colour if number else _INK, font=font)


def _wrapped(
    draw: ImageDraw.ImageDraw,
    font: ImageFont.ImageFont | ImageFont.FreeTypeFont,
    text: str,
    lines: int,
) -> list[str]:
    """Return ``text`` in at most ``lines`` lines; the last may be too long."""
    words, found = text.split(), [""]
    for word in words:
        longer = f"{found[-1]} {word}".strip()
        if len(found) < lines and found[-1] and draw.textlength(longer, font=font) > THUMBNAIL:
            found.append(word)
        else:
            found[-1] = longer
    return found


def _fitted(
    draw: ImageDraw.ImageDraw, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, text: str
) -> str:
    """Return the beginning of ``text`` that is no wider than a thumbnail."""
    if draw.textlength(text, font=font) <= THUMBNAIL:
        return text
    text = text[: THUMBNAIL // 2]
    while text and draw.textlength(f"{text}…", font=font) > THUMBNAIL:
        text = text[:-1]
    return f"{text}…"
