"""Texts without credentials: for statuses, events, logs and messages, which more people read than Secrets."""

from __future__ import annotations

import re

_USER = re.compile(r"//(?:[^\s/?#\"'<>]|[\"'](?![,:\]}\s]))*@")
_WORD = re.compile(r"[^\s\"'<>]+")
_QUERY = re.compile(r"[?#]")
_TOKEN = re.compile(r"\b(hf_|AKIA|ASIA|gh[opsur]_|github_pat_)[A-Za-z0-9_]{16,}")
_HEADER = re.compile(
    r"(?i)\b(authorization['\"]?\s{0,4}[:=]\s{0,4}['\"]?)(?:\w{1,16} {1,4})?[^\s'\"]+"
)
_BEARER = re.compile(r"(?i)\b(bearer {1,4})[A-Za-z0-9._~+/=-]{16,}")
SECRET_QUERY = r"[?&][^=&#]*(?i:sig|token|key|cred|secret|passw|auth)[^=&#]*="
"""A query whose parameters grant access, such as that of a signed URL; RE2, as the API server has it."""


def redacted(text: str) -> str:
    """Return ``text`` with *** for what could be a credential.

    These are users, passwords and queries of URLs and of paths, values of Authorization headers, and tokens
    of Hugging Face, AWS and GitHub.
    """
    text = _WORD.sub(lambda word: _without_query(word[0]), _USER.sub("//***@", text))
    for pattern in (_TOKEN, _HEADER, _BEARER):
        text = pattern.sub(r"\1***", text)
    return text


def _without_query(word: str) -> str:
    """Return ``word`` without what follows ? or # in a URL, or in a path if there is a =."""
    begin = word.find("/")
    mark = _QUERY.search(word, begin) if begin >= 0 else None
    if mark is None or ("://" not in word and "=" not in word[mark.end() :]):
        return word
    return word[: mark.end()] + "***" if mark.end() < len(word) else word
