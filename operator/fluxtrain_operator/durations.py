"""Durations as people write them, such as 2h10m."""

from __future__ import annotations

_UNITS = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))


def duration(seconds: float) -> str:
    """Return ``seconds`` in its two largest units, such as 3d4h, 2h10m, 5m30s or 0s; rounded down."""
    rest = max(0, int(seconds))
    parts: list[str] = []
    for unit, size in _UNITS:
        count, rest = divmod(rest, size)
        if count or parts:
            parts.append(f"{count}{unit}" if count else "")
        if len(parts) == 2:
            break
    return "".join(parts) or "0s"
