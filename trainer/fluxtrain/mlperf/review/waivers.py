"""Waivers of a review: findings that the submitter knows of, each rule with the submitter's reason."""

from __future__ import annotations

from collections.abc import Iterable

from fluxtrain.errors import ConfigError
from fluxtrain.mlperf.review.review import NEVER, RULES


def parse(texts: Iterable[str]) -> dict[str, str]:
    """Return the reason of each waived rule from ``RULE=REASON``; raise ConfigError for other texts."""
    waivers: dict[str, str] = {}
    for text in texts:
        name, _, reason = text.partition("=")
        if name not in RULES:
            allowed = f"no rule of that name; allowed: {', '.join(sorted(RULES))}"
            raise ConfigError("--waive", name, allowed)
        if name in NEVER:
            raise ConfigError("--waive", name, "cannot be waived: there would be no result")
        if not reason.strip():
            raise ConfigError("--waive", text, "must be RULE=REASON; the package shows the reason")
        waivers[name] = reason.strip()
    return waivers
