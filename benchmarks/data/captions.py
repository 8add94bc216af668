"""Captions of many kinds, for a comparison of tokenizers: the words of a vocabulary, and what breaks them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import emoji

_SEED = 0
_ACCENTS = "éèêëàâäçñöüßøåïîôûúíóáãõ"
_MARKS = ("\u2019", "\u2018", "\u201c", "\u201d", "\u2013", "\u2014", "\u2026", "\u00ab", "\u2022")
_ENTITIES = (
    "&amp;",
    "&lt;",
    "&gt;",
    "&quot;",
    "&#39;",
    "&#x27;",
    "&nbsp;",
    "&eacute;",
    "&amp;amp;",
)
_SPECIAL = ("<pad>", "</s>", "<unk>", "<extra_id_0>", "<|startoftext|>", "<|endoftext|>")
_PUNCTUATION = tuple(",.;:!?()[]{}<>/|#@%$*+-=_~^`\"'&")
_SPACES = ("\t", "\n", "\r\n", "\u00a0", "\u2003", "\u3000", "  ")
_CONTROLS = ("\x00", "\x07", "\x1b", "\x7f", "\x85", "\ufeff", "\ufffd")
_NO_WIDTH = ("\u200b", "\u200c", "\u200d", "\u2060", "\u00ad", "\ufe0f")
Part = Callable[[random.Random], str]


def captions(vocabulary: Sequence[str], count: int) -> dict[str, list[str]]:
    """Return ``count`` captions of each kind, of the words in ``vocabulary``, and some of no word at all."""
    draw = random.Random(_SEED)

    def sentence(least: int = 2, most: int = 24) -> list[str]:
        return draw.choices(vocabulary, k=draw.randint(least, most))

    def plain() -> str:
        words = [_cased(word, draw) for word in sentence()]
        return "".join(
            word + draw.choice((" ", " ", " ", ", ", ". ", " - ")) for word in words
        ).strip()

    def with_part(part: Part) -> str:
        words = sentence()
        for _ in range(draw.randint(1, 3)):
            place = draw.randrange(len(words))
            glued = draw.choice(("{0}{1}", "{1}{0}", "{0} {1}"))
            words[place] = glued.format(words[place], part(draw))
        return " ".join(words)

    found = {"words and punctuation": [plain() for _ in range(10 * count)]}
    for kind, part in _PARTS.items():
        found[kind] = [with_part(part) for _ in range(count)]
    found["more than 256 tokens"] = [" ".join(sentence(300, 400)) for _ in range(count)]
    found["no word"] = ["", " ", "\n", "\t ", ".", "...", "!?", "&", "\u200b", "\u00a0", "  a  "]
    return found


def words_of(vocabulary: Path) -> list[str]:
    """Return the whole words of letters in CLIP's ``vocab.json``."""
    import json

    names = json.loads(vocabulary.read_text())
    return [name.removesuffix("</w>") for name in names if _is_word(name)]


def _is_word(name: str) -> bool:
    return name.endswith("</w>") and name[:-4].isascii() and name[:-4].isalpha() and len(name) > 5


def _cased(word: str, draw: random.Random) -> str:
    return draw.choice((word, word, word, word.title(), word.upper(), f"{word}'s", f"{word}n't"))


def _one_of(texts: Sequence[str]) -> Part:
    return lambda draw: draw.choice(texts)


def _between(first: int, last: int) -> Part:
    return lambda draw: "".join(chr(draw.randint(first, last)) for _ in range(draw.randint(1, 4)))


_PARTS: dict[str, Part] = {
    "digits, years, prices": lambda draw: draw.choice(
        ("{}", "${}", "{}%", "{}th", "1,{}.00")
    ).format(draw.randint(0, 9999)),
    "addresses of the web": lambda draw: f"https://example.org/{draw.randint(0, 99)}?a=b&c=%20",
    "punctuation in words": _one_of(_PUNCTUATION),
    "HTML entities": _one_of(_ENTITIES),
    "letters with accents": _one_of(tuple(_ACCENTS)),
    "typographic quotes and dashes": _one_of(_MARKS),
    "emoji": _one_of(tuple(sorted(emoji.EMOJI_DATA))),
    "Greek, Cyrillic": _between(0x0391, 0x044F),
    "Hebrew, Arabic": _between(0x05D0, 0x064A),
    "Devanagari, Thai": _between(0x0904, 0x0E3A),
    "Chinese": _between(0x4E00, 0x9FA5),
    "Japanese kana": _between(0x3041, 0x30FE),
    "Korean": _between(0xAC00, 0xD7A3),
    "symbols of Latin-1": _between(0x00A1, 0x00BF),
    "marks U+0300 to 036F": _between(0x0300, 0x036F),
    "symbols and arrows": _between(0x2190, 0x26FF),
    "full width": _between(0xFF01, 0xFF5E),
    "mathematical letters": _between(0x1D400, 0x1D4FF),
    "other white space": _one_of(_SPACES),
    "control characters": _one_of(_CONTROLS),
    "characters of no width": _one_of(_NO_WIDTH),
    "names of special tokens": _one_of(_SPECIAL),
}
