"""Owner references: an object belongs to its controller, by uid, whatever its name and labels are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def controller_of(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the controller's owner reference; empty if the object has none."""
    references = manifest["metadata"].get("ownerReferences") or ()
    return next((reference for reference in references if reference.get("controller")), {})


def is_controlled_by(manifest: Mapping[str, Any], uid: object) -> bool:
    """Return whether the controller of the object has ``uid``."""
    return bool(uid) and controller_of(manifest).get("uid") == uid
