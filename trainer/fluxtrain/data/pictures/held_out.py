"""Which pictures of a run are held out of the training, for its evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from fluxtrain.draws import NUM_TIMESTEPS
from fluxtrain.errors import ConfigError

REPEATS = NUM_TIMESTEPS
"""Samples of a picture in the evaluation: one at each timestep."""


def held_out(sha256s: Iterable[str], part: float, seed: int) -> frozenset[str]:
    """Return those of the pictures with ``sha256s`` that are held out: ``part`` of them, at least one.

    Equal pictures stay together. The choice depends on ``seed`` and on the pictures' bytes only. Raises
    ConfigError if no picture would be left.
    """
    distinct = set(sha256s)
    if not part:
        return frozenset()
    if len(distinct) < 2:
        text = f"needs two different pictures, of which one is trained; there is {len(distinct)}"
        raise ConfigError("spec.run.data.validation_split", part, text)
    order = sorted(distinct, key=lambda each: hashlib.sha256(f"{seed} {each}".encode()).digest())
    return frozenset(order[: max(1, round(part * len(order)))])
