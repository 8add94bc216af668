"""Draws images and their prompts in a grid, as one PNG."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from fluxtrain.files import atomic_write_by_several

_CAPTION_HEIGHT, _GAP, _PER_ROW = 30, 6, 6
_SMALL, _LARGEST = 128, 384
"""Images up to the first side are drawn twice as large; larger ones to the second side at most."""
Column = tuple[str, list[Image.Image]]
"""A caption and the images below it."""


def save_grid(path: Path, columns: list[Column], title: str, footer: str = "") -> None:
    """Write ``columns`` to ``path`` as a PNG, six to a row, with ``title`` above and ``footer`` below."""
    rows = [columns[start : start + _PER_ROW] for start in range(0, len(columns), _PER_ROW)]
    every = [image for _, images in columns for image in images]
    scale = _scale(max(max(image.size) for image in every))
    cell_w = round(scale * max(image.width for image in every)) + _GAP
    cell_h = round(scale * max(image.height for image in every)) + _GAP
    heights = [_CAPTION_HEIGHT + cell_h * max(len(images) for _, images in row) for row in rows]
    footer_text = _wrap(footer, cell_w * _PER_ROW // 6, max_lines=9)
    size = sum(heights) + _CAPTION_HEIGHT + 14 * len(footer_text.splitlines())
    grid = Image.new("RGB", (cell_w * _PER_ROW + _GAP, size), "white")
    draw, font = ImageDraw.Draw(grid), ImageFont.load_default(size=11)
    draw.text((_GAP, 8), title, fill="black", font=font)
    top = _CAPTION_HEIGHT
    for row, row_height in zip(rows, heights, strict=True):
        for column, (caption, images) in enumerate(row):
            left = _GAP + column * cell_w
            text = _wrap(caption, max(22, cell_w // 6))
            draw.multiline_text((left, top), text, fill="black", font=font, spacing=1)
            for index, image in enumerate(images):
                size_drawn = round(scale * image.width), round(scale * image.height)
                drawn = image.resize(size_drawn, Image.Resampling.LANCZOS)
                grid.paste(drawn, (left, top + _CAPTION_HEIGHT + index * cell_h))
        top += row_height
    draw.multiline_text((_GAP, top), footer_text, fill="gray", font=font, spacing=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write_by_several(path) as partial:
        grid.save(partial, format="PNG")


def _scale(longest: int) -> float:
    return 2.0 if longest <= _SMALL else min(1.0, _LARGEST / longest)


def _wrap(text: str, width: int = 22, max_lines: int = 2) -> str:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines[:max_lines])
