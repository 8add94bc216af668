"""Limits on depth and size of a spec: it is processed recursively, and copied into every pod."""

from __future__ import annotations

from typing import Any

from fluxtrain.errors import UNSET, ConfigError

RECURSION_LIMIT = 12_000
"""Python's recursion limit while the operator runs: the API server accepts JSON nested 10 000 deep."""
MAX_DEPTH = 32
"""Nesting of mappings and lists in a spec; a pod's deepest field, a selector in an affinity, is at 13."""
MAX_BYTES = {"spec": 256 << 10, "spec.podTemplate": 64 << 10}
"""Size of a part of the resource as JSON. Kubernetes accepts 1.5 MiB, but each pod has a copy."""
_MAX_PATH_DEPTH = 4


def require_bounded(value: Any, at: str) -> None:
    """Raise ConfigError if ``value``, found at the path ``at``, is too deep or too large; iterative."""
    max_bytes, size = MAX_BYTES[at], 0
    stack = [(value, at, 1)]
    while stack:
        item, path, depth = stack.pop()
        if depth > MAX_DEPTH + 1:
            raise ConfigError(path, UNSET, f"must be nested at most {MAX_DEPTH} deep")
        size += _own_size(item)
        if size > max_bytes:
            raise ConfigError(at, UNSET, f"must be at most {max_bytes >> 10} KiB as JSON")
        stack += ((child, _path(path, key, depth), depth + 1) for key, child in _children(item))


def _own_size(value: Any) -> int:
    """Return the length of ``value`` as JSON without its children."""
    if isinstance(value, dict):
        return sum(len(str(key)) + 5 for key in value)
    return len(value) + 2 if isinstance(value, list | str) else 8


def _children(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list) else []


def _path(path: str, key: object, depth: int) -> str:
    if depth > _MAX_PATH_DEPTH:
        return path
    return f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}"
