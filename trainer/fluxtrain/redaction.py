"""URLs as messages may show them: without what could be a credential."""

from __future__ import annotations

import re

_URL = re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
_USER = re.compile(r"(?<=://)[^/?#]*@")
_QUERY = re.compile(r"[?#].*", re.DOTALL)
SECRET_QUERY = r"[?&][^=&#]*(?i:sig|token|key|cred|secret|passw|auth)[^=&#]*="
"""A query whose parameters grant access, such as that of a signed URL; RE2, as the API server has it."""


def redacted(text: str) -> str:
    """Return ``text`` with user names, passwords and queries of all its URLs as ``***``."""
    return _URL.sub(lambda match: _without_secrets(match[0]), text)


def _without_secrets(url: str) -> str:
    return _QUERY.sub("?***", _USER.sub("***@", url))
