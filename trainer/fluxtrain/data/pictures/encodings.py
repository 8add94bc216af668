"""The codec of captions: decodes them, and names the likely codec of those that are of another one.

The likely codec is that with the smallest cost: minus the logarithm of how probable its characters are
in a text of its language. A codec pays for what it does not decode, so that of most captions wins; a
caption that is much cheaper in another one has that.
"""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
EXTENSIONS = (".txt", ".caption")
"""Of files with a caption."""
LIKELY = "likely"
"""Before the name of the codec, in the reason of a caption."""
CONTROL = re.compile(r"[\0-\x08\x0e-\x1f\ufffe\uffff]")
"""Characters that no caption has."""
HEAD_BYTES = 1 << 10
"""Of a caption, by which its codec is guessed."""
_FILE_BYTES = 1 << 22
_MOST_GUESSED = 1000


def codec_of(head: bytes, encoding: str) -> str:
    """Return the codec of what begins with ``head``: that of its byte order mark, else ``encoding``."""
    return next((codec for mark, codec in _MARKS if head.startswith(mark)), encoding)


def text_of(content: bytes, encoding: str) -> str:
    """Return ``content`` decoded by `codec_of`; UnicodeError if it is of another codec."""
    return content.decode(codec_of(content, encoding))


def is_wide(content: bytes) -> bool:
    """Return whether ``content``, which has control characters, is likely UTF-16 without a mark."""
    return likely_codecs({"": content}).get("", "").startswith("utf-16")


def shown(encoding: str) -> str:
    """Return the name of a codec in messages."""
    return "UTF-8" if codecs.lookup(encoding).name == "utf-8" else encoding


class _Codec(NamedTuple):
    name: str
    classes: str
    """Key of _CLASSES; or of _LEADS, if most characters have two bytes."""
    prior: float = 0.0


_PUNCTUATION = (r"[\u00a0\u2018-\u201e\u2013\u2014…€°«»·½®™©×£§\u00b4№]", 4.5)
_WEST = (
    (r"[àâäáãåæçéèêëíìîïñóòôöõøœúùûüÿß]", 4.1),
    (r"[ÀÂÄÁÃÅÆÇÉÈÊËÍÌÎÏÑÓÒÔÖÕØŒÚÙÛÜ¡¿]", 6.5),
    _PUNCTUATION,
)
_CLASSES: Mapping[str, tuple[tuple[str, float], ...]] = {
    "west": _WEST,
    "east": (
        (r"[ąćęłńóśźżáčďéěíňřšťúůýžőűöüäăâîşţđ]", 4.3),
        (r"[ĄĆĘŁŃÓŚŹŻÁČĎÉĚÍŇŘŠŤÚŮÝŽŐŰÖÜÄĂÂÎŞŢĐ]", 6.5),
        _PUNCTUATION,
    ),
    "turkish": ((r"[ğış]", 4.1), (r"[ĞİŞ]", 6.5), *_WEST),
    "cyrillic": (
        (r"[\u0430-\u044f\u0451]", 3.4),
        (r"[\u0454\u0456\u0457\u045e\u0491]", 5.0),
        (r"[\u0401\u0404\u0406\u0407\u040e\u0410-\u042f\u0490]", 5.5),
        _PUNCTUATION,
    ),
    "greek": ((r"[\u03ac-\u03ce]", 3.4), (r"[\u0386-\u03ab]", 5.5), _PUNCTUATION),
    "utf-16": (
        *_WEST,
        (r"[\u00c0-\u04ff]", 5.0),
        (r"[\u3040-\u30ff]", 5.5),
        (r"[\u4e00-\uac00]", 9.0),
        (r"[\uac00-\ud7a3]", 8.5),
    ),
}
"""Non-ASCII characters of a language, as patterns, with their cost."""
_LEADS: Mapping[str, tuple[tuple[int, int, float], ...]] = {
    "gbk": ((0xB0, 0xD7, 8.3), (0xA1, 0xA3, 6.5), (0xD8, 0xF7, 11.0)),
    "big5": ((0xA4, 0xC6, 8.7), (0xA1, 0xA3, 6.5)),
    "euc-kr": ((0xB0, 0xC8, 7.8), (0xA1, 0xA3, 6.5)),
    "shift_jis": ((0x82, 0x82, 5.2), (0x83, 0x83, 6.3), (0x81, 0x81, 6.5), (0x88, 0x97, 9.3)),
    "euc-jp": ((0xA4, 0xA4, 5.2), (0xA5, 0xA5, 6.3), (0xA1, 0xA3, 6.5), (0xB0, 0xCF, 9.3)),
}
"""First bytes of the usual characters of two bytes, from the first to the last, with their cost."""
_CODECS = (
    _Codec("windows-1252", "west"),
    _Codec("windows-1250", "east", 6.0),
    _Codec("windows-1254", "turkish", 6.0),
    _Codec("windows-1251", "cyrillic"),
    _Codec("koi8-r", "cyrillic", 1.0),
    _Codec("windows-1253", "greek", 2.0),
    _Codec("cp850", "west", 6.0),
    _Codec("mac_roman", "west", 6.0),
    _Codec("gbk", "gbk"),
    _Codec("big5", "big5", 1.0),
    _Codec("shift_jis", "shift_jis", 1.0),
    _Codec("euc-jp", "euc-jp", 4.0),
    _Codec("euc-kr", "euc-kr", 2.0),
    _Codec("gb18030", "gbk", 6.0),
    _Codec("cp932", "shift_jis", 6.0),
    _Codec("cp949", "euc-kr", 6.0),
    _Codec("utf-16-le", "utf-16", 6.0),
    _Codec("utf-16-be", "utf-16", 6.0),
)
_ASCII, _RARE_BYTE, _RARE_PAIR, _UNDECODED = 3.4, 9.0, 12.0, 10.0
_SPLIT = 4.0
"""Of two neighbours that no word has."""
_IMPLAUSIBLE = 7.5
"""Cost of a byte that is not ASCII, above which a codec is no guess."""
_MARGIN, _MOST_BEYOND = 6.0, 10.0
"""Cost beyond that of its cheapest codec with which a caption has the usual one; and which counts at most."""
_NEIGHBOURS = {
    "west": r"(?=[\u00c0-\u00de\u00e0-\u024f]{2})|(?=[a-z\u00df-\u00ff][\u00c0-\u00de])",
    "cyrillic": r"(?=[A-Za-z][\u0400-\u04ff])|(?=[\u0400-\u04ff][A-Za-z])|(?=[\u0430-\u045f][\u0400-\u042f])",
    "greek": r"(?=[A-Za-z][\u0370-\u03ff])|(?=[\u0370-\u03ff][A-Za-z])|(?=[\u03ac-\u03ce][\u0386-\u03ab])",
}
_NEIGHBOURS["turkish"] = _NEIGHBOURS["west"]


def likely_codecs(contents: Mapping[str, bytes]) -> dict[str, str]:
    """Return the likely codecs of ``contents``, which are guessed of all together, by their names.

    Those without a plausible one are left out.
    """
    first = dict(islice(contents.items(), _MOST_GUESSED))
    guesses = _guesses([content[:HEAD_BYTES] for content in first.values()])
    likely = {name: guess for name, guess in zip(first, guesses, strict=True) if guess}
    for usual, _ in Counter(likely.values()).most_common(1):
        others = contents.keys() - first.keys()
        likely |= {name: usual for name in others if _decoded(contents[name], usual)}
    return likely


def likely_codec(path: Path) -> str | None:
    """Return the likely codec of the text file ``path``, by its first lines that are not ASCII."""
    with path.open("rb") as file:
        content = file.read(_FILE_BYTES)
    lines = (
        [content]
        if b"\0" in content
        else [line for line in content.splitlines() if not line.isascii()]
    )
    found = likely_codecs({str(at): line for at, line in enumerate(lines)})
    return next((codec for codec, _ in Counter(found.values()).most_common(1)), None)


def _guesses(heads: list[bytes]) -> list[str | None]:
    costs = [[_cost(head, codec) for codec in _CODECS] for head in heads]
    most = [min(row) + _MOST_BEYOND for row in costs]
    totals = [
        codec.prior + sum(min(row[at], limit) for row, limit in zip(costs, most, strict=True))
        for at, codec in enumerate(_CODECS)
    ]
    usual = min(range(len(_CODECS)), key=totals.__getitem__, default=0)
    return [_guess(head, row, usual) for head, row in zip(heads, costs, strict=True)]


def _guess(head: bytes, costs: list[float], usual: int) -> str | None:
    """Return the codec ``usual`` unless another is much cheaper for ``head``."""
    if not head.isascii() and _decoded(head, "utf-8"):
        return "utf-8"
    own = min(range(len(costs)), key=lambda at: costs[at] + _CODECS[at].prior)
    if costs[usual] <= costs[own] + _MARGIN and _decoded(head, _CODECS[usual].name):
        own = usual
    num_ascii = 0 if _CODECS[own].classes == "utf-16" else sum(byte < 0x80 for byte in head)
    most = _ASCII * num_ascii + _IMPLAUSIBLE * (len(head) - num_ascii)
    return _CODECS[own].name if costs[own] <= most else None


def _cost(head: bytes, codec: _Codec) -> float:
    text = _decoded(head, codec.name)
    if not text:
        return _UNDECODED * len(head)
    count = Counter(text)
    single = sum(number * _cost_of(char, codec) for char, number in count.items())
    neighbours = _NEIGHBOURS.get(codec.classes)
    return single + (_SPLIT * len(re.findall(neighbours, text)) if neighbours else 0.0)


@lru_cache(maxsize=1 << 16)
def _cost_of(char: str, codec: _Codec) -> float:
    if char.isascii():
        return _ASCII
    if codec.classes in _CLASSES:
        classes: Iterable[tuple[str, float]] = _CLASSES[codec.classes]
        rare = _RARE_PAIR if codec.classes == "utf-16" else _RARE_BYTE
        return next((cost for pattern, cost in classes if re.match(pattern, char)), rare)
    encoded = char.encode(codec.name)
    if len(encoded) == 1:  # half a katakana
        return _RARE_BYTE
    is_extension = codec.classes in ("gbk", "euc-kr") and encoded[1] < 0xA1
    leads = () if is_extension else _LEADS[codec.classes]
    found = (cost for first, last, cost in leads if first <= encoded[0] <= last)
    return next(found, _RARE_PAIR * len(encoded) / 2)


def _decoded(content: bytes, codec: str) -> str:
    """Return ``content``, which may be the head of a caption, as text; "" if it is of another codec."""
    is_whole = len(content) < HEAD_BYTES
    try:
        text = codecs.getincrementaldecoder(codec)().decode(content, final=is_whole)
    except UnicodeError:
        return ""
    return "" if CONTROL.search(text) else text
