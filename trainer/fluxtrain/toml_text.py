"""Parses TOML of strangers: a key of very many parts, for which tomllib takes hours, is refused."""

from __future__ import annotations

import re
import tomllib
from typing import Any

_MAX_PARTS = 64
_PART = r"(?>[\w-]+|\"[^\"\n]*\"|'[^'\n]*')[ \t]*\.[ \t]*"
_LONG_KEY = re.compile(rf"(?<![\w-])(?>{_PART}){{{_MAX_PARTS}}}")


def parse_toml(text: str) -> dict[str, Any]:
    """Return the content of ``text``; ValueError, with the reason, if it is not TOML or nested too deeply."""
    if _LONG_KEY.search(text):
        raise ValueError(f"a key has more than {_MAX_PARTS} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
