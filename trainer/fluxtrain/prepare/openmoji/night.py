"""Pictures in one style, to train a LoRA with: OpenMoji at night, with white outlines on dark blue.

data/openmoji/night/1F600.png, 1F600.txt, ...   pictures and their captions, with ATTRIBUTION.md
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

from fluxtrain.prepare.openmoji.catalogue import Emoji, shuffle_key
from fluxtrain.prepare.progress import Advance

_NUM_LEFT_OUT = 40
"""Emoji of the same kinds without a picture: prompts for them show whether the style was learned."""
_PEOPLE, _SHAPES = ("man", "woman", "person"), ("circle", "square")
_SVG = "http://www.w3.org/2000/svg"
_PAINTS = ("fill", "stroke")
_DARK, _WHITE = "#10243f", "#ffffff"


def draw_night(
    output: Path, advance: Advance, emoji: Sequence[Emoji], folder: Path, size: int
) -> None:
    """Write a PNG of ``size`` x ``size`` pixels and a caption for each of ``emoji``."""
    from resvg_py import svg_to_bytes

    output.mkdir(parents=True)
    for item in emoji:
        svg = with_white_outlines((folder / f"{item.key}.svg").read_text())
        png = svg_to_bytes(svg_string=svg, width=size, height=size, background=_DARK)
        (output / f"{item.key}.png").write_bytes(bytes(png))
        (output / f"{item.key}.txt").write_text(f"{item.caption}\n")
        advance(1)


def choose(emoji: Sequence[Emoji]) -> list[Emoji]:
    """Return those of ``emoji`` to draw: faces, people, circles, squares and keycaps, without some of them.

    The demo's small model draws these kinds well, since OpenMoji has many of each.
    """
    kinds = [item for item in emoji if not item.has_skin_tone and _is_of_a_kind(item.caption)]
    return sorted(kinds, key=lambda item: shuffle_key(item.key))[_NUM_LEFT_OUT:]


def _is_of_a_kind(caption: str) -> bool:
    words = caption.split()
    return "face" in words or words[0] in _PEOPLE or words[-1] in _SHAPES or words[0] == "keycap"


def with_white_outlines(svg: str) -> str:
    """Return OpenMoji's ``svg`` with its outlines in white instead of black."""
    root = ET.fromstring(svg)
    for group in root:
        if group.get("id") == "line":
            for element in group.iter():
                _paint(element)
    ET.register_namespace("", _SVG)
    return ET.tostring(root, encoding="unicode")


def _paint(element: ET.Element) -> None:
    for name in _PAINTS:
        if element.get(name) not in (None, "none"):
            element.set(name, _WHITE)
