"""Whose an object is: its controller's, by uid. A name or a label says nothing about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def controller(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the reference to what controls the object in ``manifest``; empty where nothing does."""
    owners = manifest["metadata"].get("ownerReferences") or ()
    return next((owner for owner in owners if owner.get("controller")), {})


def is_of(manifest: Mapping[str, Any], uid: object) -> bool:
    """Return whether what has ``uid`` controls the object in ``manifest``."""
    return bool(uid) and controller(manifest).get("uid") == uid
