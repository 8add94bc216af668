"""Entries of manifests, which may have any type: those of another type than expected are left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def mapping(of: Mapping[Any, Any], key: str) -> Mapping[str, Any]:
    """Return the mapping at ``key``; an empty one for anything else."""
    value = of.get(key)
    return value if isinstance(value, Mapping) else {}


def mappings(of: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """Return the mappings in the list at ``key``."""
    return [item for item in items(of, key) if isinstance(item, Mapping)]


def items(of: Mapping[str, Any], key: str) -> list[Any]:
    """Return the list at ``key``; an empty one for anything else."""
    value = of.get(key)
    return value if isinstance(value, list) else []
