"""Which ranks share one copy of the training state: replicas of equally many ranks, in rank order (HSDP)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fluxtrain.contract.run.config import PER_NODE, RunConfig
from fluxtrain.errors import ConfigError


@dataclass(frozen=True)
class Sharding:
    """Distribution of the training state over the ranks of equal nodes."""

    num_ranks: int
    ranks_per_node: int
    dp_replicate: int

    @staticmethod
    def of(config: RunConfig, num_ranks: int, ranks_per_node: int) -> Sharding:
        """Return the sharding with as many replicas as ``config`` allows.

        The ranks of a replica are all or some of one node, or whole nodes: a replica that shares nodes with
        others would gather its weights across nodes without need.
        """
        requested = config.parallel.dp_replicate
        most = num_ranks // ranks_per_node if requested == PER_NODE else min(requested, num_ranks)
        counts = (count for count in range(most, 1, -1) if num_ranks % count == 0)
        shardings = (Sharding(num_ranks, ranks_per_node, count) for count in counts)
        aligned = (sharding for sharding in shardings if sharding._is_aligned)
        return next(aligned, Sharding(num_ranks, ranks_per_node, 1))

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes."""
        return self.num_ranks // self.ranks_per_node

    @property
    def dp_shard(self) -> int:
        """Return the number of ranks that share one replica of the state."""
        return self.num_ranks // self.dp_replicate

    @property
    def crosses_nodes(self) -> bool:
        """Return whether the ranks of one replica are on several nodes."""
        return self.dp_shard > self.ranks_per_node

    @property
    def _is_aligned(self) -> bool:
        smaller, larger = sorted((self.dp_shard, self.ranks_per_node))
        return larger % smaller == 0


def require_replicas(config: RunConfig, rank_counts: Sequence[int]) -> None:
    """Raise ConfigError if a fixed dp_replicate divides none of ``rank_counts``, which are ascending."""
    requested = config.parallel.dp_replicate
    if requested != PER_NODE and all(count % requested for count in rank_counts):
        first, last = rank_counts[0], rank_counts[-1]
        counts = f"{first}" if first == last else f"{first} to {last}"
        text = f"must divide the number of ranks, {counts}"
        raise ConfigError("spec.run.parallel.dp_replicate", requested, text)
