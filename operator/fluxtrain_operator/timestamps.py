"""Kubernetes' timestamps, RFC 3339 in UTC, to and from Unix seconds."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime


def stamp(seconds: float) -> str:
    """Return Unix ``seconds`` as a timestamp, truncated to seconds."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds(text: object) -> float | None:
    """Return the Unix seconds of a timestamp; None if ``text`` is not one."""
    if not isinstance(text, str):
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()


def earliest(times: Iterable[float | None]) -> float | None:
    """Return the earliest of ``times``; None if there is none."""
    return min((time for time in times if time is not None), default=None)
