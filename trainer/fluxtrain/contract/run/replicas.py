"""How many replicas of the shards a number of ranks holds: fewer at times in an elastic job."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.errors import ConfigError


def replicas(config: RunConfig, num_ranks: int) -> int:
    """Return the replicas on ``num_ranks`` ranks: as many as asked for, or what divides both numbers."""
    return gcd(config.parallel.dp_replicate, num_ranks)


def require_replicas(config: RunConfig, rank_counts: Sequence[int]) -> None:
    """Raise ConfigError where none of ``rank_counts``, ascending, can hold the replicas asked for."""
    asked = config.parallel.dp_replicate
    if all(count % asked for count in rank_counts):
        first, last = rank_counts[0], rank_counts[-1]
        counts = f"{first}" if first == last else f"{first} to {last}"
        raise ConfigError(
            "spec.run.parallel.dp_replicate", asked, f"must divide the number of ranks, {counts}"
        )
