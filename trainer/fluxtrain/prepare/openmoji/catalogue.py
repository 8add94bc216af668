"""The catalogue of emoji: their captions, and their split into training and validation.

An emoji's key is the stem of its SVG: its code points, ``1F44B-1F3FD``. Its base is the key without skin
tone, hair and gender: variants of one base are near-duplicates, so all of them are on the same side of the
split.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from fluxtrain.errors import DataError

_SKIN_TONES = frozenset({"1F3FB", "1F3FC", "1F3FD", "1F3FE", "1F3FF"})
_HAIR = frozenset({"1F9B0", "1F9B1", "1F9B2", "1F9B3"})
_PERSON = "1F9D1"
_MAN_OR_WOMAN = frozenset({"1F468", "1F469"})
_GENDER_SIGNS = frozenset({"2640", "2642"})
_JOINER, _EMOJI_STYLE, _TAGGED_FLAG = "200D", "FE0F", "1F3F4-E00"
_REGIONS = range(0x1F1E6, 0x1F200)
_QUOTES = str.maketrans({"\u201c": None, "\u201d": None, "\u2019": "'", "_": " "})


@dataclass(frozen=True)
class Emoji:
    """One image and its caption."""

    key: str
    caption: str
    base: str

    @property
    def has_skin_tone(self) -> bool:
        """Return whether it is a skin tone variant of another emoji."""
        return not _SKIN_TONES.isdisjoint(self.key.split("-"))


def read_catalogue(folder: Path) -> list[Emoji]:
    """Return the emoji of ``folder`` that have a name, sorted by key; DataError if there is no SVG."""
    keys = sorted(path.stem for path in folder.glob("*.svg"))
    if not keys:
        raise DataError(f"{folder}: there are no SVG files")
    return [Emoji(key, name, base(key)) for key in keys if (name := caption(key)) is not None]


def caption(key: str) -> str | None:
    """Return the name of ``key`` in lower case, from CLDR or else Unicode; None if it has none."""
    points = [int(part, 16) for part in key.split("-")]
    text = "".join(map(chr, points))
    name = _cldr_name(text) or (unicodedata.name(text, None) if len(text) == 1 else None)
    if name is None:
        return None
    plain = " ".join(name.translate(_QUOTES).lower().split())
    is_flag = len(points) == 2 and all(point in _REGIONS for point in points)
    return f"flag: {plain}" if is_flag or key.startswith(_TAGGED_FLAG) else plain


def base(key: str) -> str:
    """Return ``key`` without skin tone, hair, gender, joiners and style marks."""
    dropped = _SKIN_TONES | _HAIR | {_EMOJI_STYLE}
    parts = [part for part in key.split("-") if part not in dropped]
    if len(parts) > 1:  # alone, the signs are emoji themselves
        parts = [part for part in parts if part not in _GENDER_SIGNS]
    parts = [_PERSON if part in _MAN_OR_WOMAN else part for part in parts]
    while parts and parts[-1] == _JOINER:
        parts.pop()
    return "-".join(parts) or key


def split(
    emoji: Iterable[Emoji], num_validation_bases: int, num_skin_tones: int
) -> tuple[list[Emoji], list[Emoji]]:
    """Return training and validation emoji, with at most ``num_skin_tones`` toned variants of each base.

    All variants would be half of the images, and rare objects would be seen too seldom.
    """
    by_base = {
        name: list(group)
        for name, group in groupby(sorted(emoji, key=_sort_key), key=lambda one: one.base)
    }
    held_out = set(sorted(by_base, key=shuffle_key)[:num_validation_bases])
    sides: tuple[list[Emoji], list[Emoji]] = ([], [])
    for name, variants in by_base.items():
        sides[name in held_out].extend(_limit_skin_tones(variants, num_skin_tones))
    return sides


def _limit_skin_tones(variants: list[Emoji], num_skin_tones: int) -> list[Emoji]:
    plain = [emoji for emoji in variants if not emoji.has_skin_tone]
    toned = [emoji for emoji in variants if emoji.has_skin_tone]
    return plain + sorted(toned, key=lambda emoji: shuffle_key(emoji.key))[:num_skin_tones]


def _sort_key(emoji: Emoji) -> tuple[str, str]:
    return emoji.base, emoji.key


def shuffle_key(name: str) -> bytes:
    """Return a sort key that shuffles, the same on every machine."""
    return hashlib.sha256(name.encode()).digest()


def _cldr_name(text: str) -> str | None:
    from emoji import EMOJI_DATA

    for spelling in (text, text.replace("\ufe0f", ""), f"{text}\ufe0f"):
        if spelling in EMOJI_DATA:
            return str(EMOJI_DATA[spelling]["en"]).strip(":")
    return None
