"""The order of the nodes' ranks: by topology, such as the rack, by node, and by pod."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fluxtrain.contract.launch import ENV_NODE, ENV_TOPOLOGY

MAX_LENGTH = 256
"""Of a key, in characters."""


def rank_order_key(environment: Mapping[str, str], hostname: str) -> str:
    """Return the key that orders the ranks of this pod; only the host name if nothing else is known."""
    parts = (environment.get(ENV_TOPOLOGY), environment.get(ENV_NODE), hostname)
    return "/".join(part for part in parts if part)[:MAX_LENGTH]


def natural(key: str) -> list[str | int]:
    """Return ``key`` as it sorts: numbers by their value, so that job-2 precedes job-10."""
    parts = re.split("([0-9]+)", key)
    return [int(part) if number % 2 else part for number, part in enumerate(parts)]
