"""Images side by side with their prompts, as one PNG."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from fluxtrain.files import atomic_write

_CAPTION_HEIGHT, _GAP, _SCALE, _PER_ROW = 30, 6, 2, 6
Column = tuple[str, list[Image.Image]]


def save_grid(path: Path, columns: list[Column], title: str, footer: str = "") -> None:
    """Write a PNG of ``columns``: a caption above pictures that belong together, six to a row.

    ``footer`` stands below them, in as many lines as it takes.
    """
    rows = [columns[start : start + _PER_ROW] for start in range(0, len(columns), _PER_ROW)]
    width, height = columns[0][1][0].size
    cell_w, cell_h = width * _SCALE + _GAP, height * _SCALE + _GAP
    heights = [_CAPTION_HEIGHT + cell_h * max(len(pictures) for _, pictures in row) for row in rows]
    below = _wrapped(footer, cell_w * _PER_ROW // 6, most=9)
    size = sum(heights) + _CAPTION_HEIGHT + 14 * len(below.splitlines())
    grid = Image.new("RGB", (cell_w * _PER_ROW + _GAP, size), "white")
    draw, font = ImageDraw.Draw(grid), ImageFont.load_default(size=11)
    draw.text((_GAP, 8), title, fill="black", font=font)
    top = _CAPTION_HEIGHT
    for row, row_height in zip(rows, heights, strict=True):
        for number, (caption, pictures) in enumerate(row):
            left = _GAP + number * cell_w
            draw.multiline_text((left, top), _wrapped(caption), fill="black", font=font, spacing=1)
            for index, picture in enumerate(pictures):
                enlarged = picture.resize(
                    (width * _SCALE, height * _SCALE), Image.Resampling.LANCZOS
                )
                grid.paste(enlarged, (left, top + _CAPTION_HEIGHT + index * cell_h))
        top += row_height
    draw.multiline_text((_GAP, top), below, fill="gray", font=font, spacing=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial:
        grid.save(partial, format="PNG")


def _wrapped(text: str, width: int = 22, most: int = 2) -> str:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines[:most])
