"""Texts without credentials: for statuses, events and logs, which more people read than Secrets."""

from __future__ import annotations

import re

_URL = re.compile(r"://(?:[^\s/@?#\"'<>]*(@))?([^\s?#\"'<>]*)(\?[^\s#\"'<>]*)?")
_TOKEN = re.compile(r"\b(hf_|AKIA|ASIA|ghp_|github_pat_)[A-Za-z0-9_]{16,}")
_HIDDEN = "***"


def redacted(text: str) -> str:
    """Return ``text`` with *** for users and passwords and queries of URLs, and for known kinds of tokens."""
    return _TOKEN.sub(rf"\1{_HIDDEN}", _URL.sub(_without_secrets, text))


def _without_secrets(url: re.Match[str]) -> str:
    user, path, query = url.groups()
    begin = f"://{_HIDDEN}@" if user else "://"
    return begin + path + (f"?{_HIDDEN}" if query else "")
