"""The number of HSDP replicas on a number of ranks; an elastic job may have fewer than configured."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.errors import ConfigError


def replicas(config: RunConfig, num_ranks: int) -> int:
    """Return the replicas on ``num_ranks`` ranks: the gcd of ``num_ranks`` and dp_replicate."""
    return gcd(config.parallel.dp_replicate, num_ranks)


def require_replicas(config: RunConfig, rank_counts: Sequence[int]) -> None:
    """Raise ConfigError if dp_replicate divides none of ``rank_counts``, which are ascending."""
    requested = config.parallel.dp_replicate
    if all(count % requested for count in rank_counts):
        first, last = rank_counts[0], rank_counts[-1]
        counts = f"{first}" if first == last else f"{first} to {last}"
        text = f"must divide the number of ranks, {counts}"
        raise ConfigError("spec.run.parallel.dp_replicate", requested, text)
