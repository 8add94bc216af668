"""Fields of spec.run set on the command line."""

from __future__ import annotations

from typing import Any

import yaml


def parse_overrides(words: list[str]) -> dict[str, Any]:
    """Return ``--section.field=value`` words as a nested mapping."""
    result: dict[str, Any] = {}
    for word in words:
        path, _, text = word.removeprefix("--").partition("=")
        *sections, name = path.split(".")
        below = result
        for section in sections:
            below = below.setdefault(section, {})
        below[name] = yaml.safe_load(text)
    return result
