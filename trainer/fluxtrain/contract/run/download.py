"""DownloadConfig, ``spec.run.data.download``, and the URLs that data may have."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from fluxtrain.contract.strict_model import Path, Rule, StrictModel
from fluxtrain.redaction import SECRET_QUERY

_READ = r"^(https?://[^/?#]+/|s3://[^/?#]+(/|$)|hf://datasets/[^/?#]+/[^/?#]+)"
_USER = r"^[^:]*://[^/?#]*@"


class DownloadConfig(StrictModel):
    """How data with a URL are fetched to each node; credentials come from the environment (docs/data.md)."""

    folder: Path | None = None
    """Folder of the node, which runs may share; null: one in the temporary folder."""
    max_bytes: Annotated[int, Field(ge=1 << 20, le=1 << 50)] = 200 << 30
    """Most bytes in ``folder``: the least recently used data are removed; what does not fit is refused."""
    connections: Annotated[int, Field(ge=1, le=64)] = 8
    """Files that each node fetches at the same time."""
    attempts: Annotated[int, Field(ge=1, le=100)] = 5
    """Times that a file is tried without getting further."""
    stream: bool = False
    """Fetch, encode and remove one shard, or a few pictures, after the other, divided over the ranks, instead
    of all of them on each node; the samples are the same."""


def is_url(text: str) -> bool:
    """Return whether ``text`` is a URL rather than a path."""
    return "://" in text


def url_rules(field: str) -> tuple[Rule, ...]:
    """Return the rules for ``field``, a path or a URL that may be null."""
    return tuple(_rule(field, pattern, message, wanted) for pattern, message, wanted in _PATTERNS)


def url_fault(url: str) -> str | None:
    """Return what ``url`` must be and is not, or None; `url_rules` has the same for fields."""
    for pattern, message, wanted in _PATTERNS:
        if bool(re.search(pattern, url)) != wanted:
            return message
    return None


_PATTERNS = (
    (
        _READ,
        "must be a path, or a URL that begins with https://host/, s3://bucket or hf://datasets/owner/name",
        True,
    ),
    (_USER, "must not contain a user name; credentials come from the environment", False),
    (
        SECRET_QUERY,
        "must not contain a key or a token; credentials come from the environment",
        False,
    ),
)


def _rule(field: str, pattern: str, message: str, wanted: bool) -> Rule:
    def holds(model: object) -> bool:
        value = getattr(model, field)
        return value is None or not is_url(value) or bool(re.search(pattern, value)) == wanted

    sign = "" if wanted else "!"
    cel = f"!has(self.{field}) || !self.{field}.contains('://') || {sign}self.{field}.matches('{pattern}')"
    return Rule(field, message, holds, cel)
