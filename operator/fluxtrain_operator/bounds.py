"""How deep and how large a spec may be: it is walked by what recurses, and copied into every pod."""

from __future__ import annotations

from typing import Any

from fluxtrain.errors import UNSET, ConfigError

DECODED_DEPTH = 12_000
"""Python's own bound on nesting, once raised: the API server's is 10 000, and what it sends must be read."""
MOST_DEPTH = 32
"""Of mappings and lists in a spec; a pod's deepest field, a selector in an affinity, is at 13."""
MOST_BYTES = {"spec": 256 << 10, "spec.podTemplate": 64 << 10}
"""Of a part of the resource as JSON. Kubernetes takes 1.5 MiB, and then once for each node."""
_SHOWN_DEPTH = 4


def require_bounded(value: Any, at: str) -> None:
    """Raise ConfigError where ``value``, which stands at ``at``, is too deep or too large. Never recurses."""
    most, size = MOST_BYTES[at], 0
    left = [(value, at, 1)]
    while left:
        found, path, depth = left.pop()
        if depth > MOST_DEPTH + 1:
            raise ConfigError(path, UNSET, f"must be nested at most {MOST_DEPTH} deep")
        size += _own_size(found)
        if size > most:
            raise ConfigError(at, UNSET, f"must be at most {most >> 10} KiB as JSON")
        left += ((below, _path(path, key, depth), depth + 1) for key, below in _below(found))


def _own_size(value: Any) -> int:
    """Return the characters of ``value`` as JSON, what is in it left out."""
    if isinstance(value, dict):
        return sum(len(str(key)) + 5 for key in value)
    return len(value) + 2 if isinstance(value, list | str) else 8


def _below(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list) else []


def _path(path: str, key: object, depth: int) -> str:
    if depth > _SHOWN_DEPTH:
        return path
    return f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}"
