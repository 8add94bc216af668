"""Pictures in one style, to train a LoRA with: OpenMoji's outlines in white on blue, as on a blueprint.

data/openmoji/blueprints/1F600.png, 1F600.txt, ...   pictures and their captions, with ATTRIBUTION.md
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

from fluxtrain.prepare.openmoji.catalogue import Emoji, shuffle_key
from fluxtrain.prepare.progress import Advance

_NUM_PICTURES = 400
_SVG = "http://www.w3.org/2000/svg"
_PAINTS = ("fill", "stroke")
_BLUE, _WHITE = "#1d4fa3", "#ffffff"


def draw_blueprints(
    output: Path, advance: Advance, emoji: Sequence[Emoji], folder: Path, size: int
) -> None:
    """Write a PNG of ``size`` x ``size`` pixels and a caption for each of ``emoji`` that has outlines."""
    from resvg_py import svg_to_bytes

    output.mkdir(parents=True)
    for item in emoji:
        if (svg := outlines((folder / f"{item.key}.svg").read_text())) is not None:
            png = svg_to_bytes(svg_string=svg, width=size, height=size, background=_BLUE)
            (output / f"{item.key}.png").write_bytes(bytes(png))
            (output / f"{item.key}.txt").write_text(f"{item.caption}\n")
        advance(1)


def choose(emoji: Sequence[Emoji]) -> list[Emoji]:
    """Return some of ``emoji``, always the same ones: no flags, which look alike, and no skin tones."""
    plain = [
        item for item in emoji if not item.caption.startswith("flag:") and not item.has_skin_tone
    ]
    return sorted(plain, key=lambda item: shuffle_key(item.key))[:_NUM_PICTURES]


def outlines(svg: str) -> str | None:
    """Return only the outlines of OpenMoji's ``svg``, in white; None if it has none."""
    root = ET.fromstring(svg)
    lines = [group for group in root if group.get("id") == "line" and len(group)]
    if not lines:
        return None
    for group in list(root):
        if group not in lines:
            root.remove(group)
    for element in root.iter():
        for name in _PAINTS:
            if element.get(name) not in (None, "none"):
                element.set(name, _WHITE)
    ET.register_namespace("", _SVG)
    return ET.tostring(root, encoding="unicode")
