"""Bytes that ranks and nodes send in one optimizer step, with FSDP2 or HSDP and ring collectives."""

from __future__ import annotations

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.sharding import Sharding
from fluxtrain.model.activations import BYTES
from fluxtrain.model.parameters import count_parameters


def sent_by_rank(config: RunConfig, sharding: Sharding, accumulation: int) -> int:
    """Return the bytes that one rank sends in one optimizer step of ``accumulation`` micro batches."""
    return round(accumulation * (_within(config, sharding) + _between(config, sharding)))


def sent_by_node(config: RunConfig, sharding: Sharding, accumulation: int) -> int:
    """Return the bytes that one node sends to other nodes in one optimizer step.

    A ring in the order of the ranks leaves each of its nodes once. Each node has a part of as many rings
    between the replicas as it has different shards.
    """
    if sharding.num_nodes == 1:
        return 0
    shards = min(sharding.dp_shard, sharding.ranks_per_node)
    within = _within(config, sharding) if sharding.crosses_nodes else 0
    return round(accumulation * (within + shards * _between(config, sharding)))


def sent_within_node(config: RunConfig, sharding: Sharding, accumulation: int) -> int:
    """Return the bytes that the ranks of one node send each other in one optimizer step."""
    ranks = sharding.ranks_per_node * sent_by_rank(config, sharding, accumulation)
    return ranks - sent_by_node(config, sharding, accumulation)


def _within(config: RunConfig, sharding: Sharding) -> float:
    """Return what a rank sends to the others of its replica for one micro batch.

    It all-gathers every block for forward, and again for backward if it was resharded, and reduce-scatters
    its gradients.
    """
    counts = count_parameters(config.model, sharding.dp_shard)  # padding is sent too
    blocks = counts.total - counts.rest
    gathers = blocks * (2 if config.parallel.reshard_after_forward else 1) + counts.rest
    content = gathers * BYTES[config.precision.compute] + counts.total * _reduce_bytes(config)
    return content * (sharding.dp_shard - 1) / sharding.dp_shard


def _between(config: RunConfig, sharding: Sharding) -> float:
    """Return what a rank sends to other replicas for one micro batch: an all-reduce of its shard."""
    counts = count_parameters(config.model, sharding.dp_shard)
    shard = counts.total // sharding.dp_shard
    return 2 * shard * _reduce_bytes(config) * (sharding.dp_replicate - 1) / sharding.dp_replicate


def _reduce_bytes(config: RunConfig) -> int:
    return BYTES[config.precision.reduce]
