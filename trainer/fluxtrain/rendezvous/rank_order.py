"""The order of the nodes' ranks: by place, such as the rack, by node, and by pod."""

from __future__ import annotations

from collections.abc import Mapping

from fluxtrain.contract.launch import ENV_NODE, ENV_TOPOLOGY
from fluxtrain.contract.places import natural

MAX_LENGTH = 256
"""Of a key, in characters."""


def rank_order_key(environment: Mapping[str, str], hostname: str) -> str:
    """Return the key that orders the ranks of this pod; only the host name if nothing else is known."""
    parts = (environment.get(ENV_TOPOLOGY), environment.get(ENV_NODE), hostname)
    return "/".join(part for part in parts if part)[:MAX_LENGTH]


def rank_order(place: int | None, key: str, agent: str) -> tuple[object, ...]:
    """Return what sorts an agent: nodes whose ``place`` is unknown come last."""
    return place is None, place or 0, natural(key), agent
