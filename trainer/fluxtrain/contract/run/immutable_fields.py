"""The immutable fields of ``spec.run``, marked IMMUTABLE in config.py: they determine what is computed.

A resume from a checkpoint with other values is refused, as is a change through the API server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxtrain.contract.describe import iter_fields
from fluxtrain.contract.run.config import RunConfig

IMMUTABLE_PATHS = tuple(field.path for field in iter_fields(RunConfig) if field.immutable)
"""The fields that determine the result; the others are paths, resources and intervals."""


def value_at(values: Mapping[str, Any], path: str) -> Any:
    """Return the value at ``path`` in nested mappings, None if it is missing."""
    current: Any = values
    for name in path.split("."):
        current = current.get(name) if isinstance(current, Mapping) else None
    return current
