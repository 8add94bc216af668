"""Which fields decide what is computed: they stay as they are while a run lives.

A resume with other values would be another run, so checkpoints refuse it and the API server refuses
the change. The marks stand at the fields themselves, in config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxtrain.contract.describe import walk
from fluxtrain.contract.run.config import RunConfig

FIXED_PATHS = tuple(facts.path for facts in walk(RunConfig) if facts.fixed)
"""Every field that decides the trajectory; the others are places, resources and how often to look."""


def value_at(values: Mapping[str, Any], path: str) -> Any:
    """Return the value at ``path`` of nested mappings, None where something on the way is missing."""
    current: Any = values
    for name in path.split("."):
        current = current.get(name) if isinstance(current, Mapping) else None
    return current
