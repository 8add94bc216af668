"""Fonts for text of any script: matplotlib's DejaVu, and installed fonts for what it lacks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import groupby
from pathlib import Path

from PIL import ImageFont

SUGGESTED = "Noto Sans CJK"
_NO_REAL_GLYPHS = "lastresort"
"""Part of the file names of fonts that have a box for every character."""


class Fonts:
    """The fonts with which texts are drawn at one size; characters that none has are replaced."""

    def __init__(self, size: int, texts: Iterable[str]) -> None:
        """Find fonts for all characters of ``texts``; installed ones are looked at if DejaVu lacks some."""
        from matplotlib import get_data_path

        base = Path(get_data_path()) / "fonts/ttf/DejaVuSans.ttf"
        self.base = ImageFont.truetype(base, size=size)
        self._of = dict[str, ImageFont.FreeTypeFont]()
        needed = {char for text in texts for char in text if _is_seen(char)}
        left = needed - _characters(base)
        for path, has in _best_first(left) if left else ():
            if found := left & has:
                try:
                    font = ImageFont.truetype(path, size=size)
                except OSError:  # such as one of bitmaps, which has other sizes
                    continue
                self._of |= dict.fromkeys(found, font)
                left -= found
        self.lacking = "".join(sorted(left))
        """Characters that no font has."""

    def drawable(self, text: str) -> str:
        """Return ``text`` with the number of characters in place of those that no font has."""
        parts = groupby(text, key=lambda char: char in self.lacking)
        return "".join(_count(len([*part])) if lacks else "".join(part) for lacks, part in parts)

    def runs(self, text: str) -> Iterator[tuple[str, ImageFont.FreeTypeFont]]:
        """Yield the parts of ``text`` with the font of each."""
        for font, part in groupby(text, key=lambda char: self._of.get(char, self.base)):
            yield "".join(part), font

    def length(self, text: str) -> float:
        """Return the width of ``text`` in pixels."""
        return sum(font.getlength(part) for part, font in self.runs(text))


def _count(characters: int) -> str:
    return f"[{characters} character{'s' * (characters > 1)}]"


def _is_seen(char: str) -> bool:
    """Return whether ``char`` is drawn: not a space, a mark of formatting or a selector."""
    return char.isprintable() and not char.isspace() and not 0xFE00 <= ord(char) <= 0xFE0F


def _best_first(wanted: set[str]) -> list[tuple[Path, frozenset[str]]]:
    """Return the installed fonts that have some of ``wanted``, those with the most first."""
    found = [(path, _characters(path) & wanted) for path in map(Path, sorted(installed_fonts()))]
    useful = [pair for pair in found if pair[1] and _NO_REAL_GLYPHS not in pair[0].name.lower()]
    return sorted(useful, key=lambda pair: (-len(pair[1]), pair[0].name, pair[0]))


def installed_fonts() -> list[str]:
    """Return the files of the fonts of this machine."""
    from matplotlib.font_manager import findSystemFonts

    return findSystemFonts()


@cache
def _characters(path: Path) -> frozenset[str]:
    """Return the characters that the font ``path`` has; none if it cannot be read."""
    from matplotlib.ft2font import FT2Font

    try:
        return frozenset(map(chr, FT2Font(str(path)).get_charmap()))
    except (OSError, RuntimeError, ValueError):
        return frozenset()


def named(characters: str, most: int = 5) -> str:
    """Return the first of ``characters`` with their numbers, for a message."""
    first = ", ".join(f"{char} U+{ord(char):04X}" for char in characters[:most])
    more = len(characters) - most
    return first + (f" and {more} more" if more > 0 else "")
