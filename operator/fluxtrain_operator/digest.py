"""Short hashes of JSON values."""

from __future__ import annotations

import hashlib
import json


def digest(value: object) -> str:
    """Return a short hash of the JSON ``value``."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
