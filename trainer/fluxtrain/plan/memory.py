"""Memory and communication of one rank with FSDP2 or HSDP."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.replicas import replicas
from fluxtrain.model.activations import BYTES, activation_bytes
from fluxtrain.model.parameters import ParameterCounts
from fluxtrain.optim import STATE

_FLOAT32 = 4


class Memory(BaseModel):
    """Peak memory of one GPU in a step, in bytes."""

    model_config = ConfigDict(frozen=True)

    weights: int
    """This rank's shard of the weights, float32."""
    gradients: int
    """This rank's shard of the gradients, float32."""
    optimizer: int
    """This rank's shard of the optimizer's state, float32."""
    gathered: int
    """Gathered blocks: weights in the compute dtype, and one block's gradients during their reduction."""
    activations: int
    """Activations of one micro batch, kept for the backward pass."""
    total: int
    """Sum of the above."""


@dataclass(frozen=True)
class Sharding:
    """Distribution of the parameters over the ranks."""

    num_ranks: int
    dp_replicate: int
    sharded: bool  # a single rank in float32 does not use FSDP2

    @property
    def dp_shard(self) -> int:
        """Return the number of ranks that share one replica of the state."""
        return self.num_ranks // self.dp_replicate


def state_bytes(config: RunConfig) -> int:
    """Return the bytes of one parameter in a checkpoint: weight and optimizer state in float32."""
    return _FLOAT32 * (1 + len(STATE[config.optim.name]))


def make_sharding(config: RunConfig, num_ranks: int) -> Sharding:
    """Return the sharding that parallelize.build_model applies on ``num_ranks`` ranks."""
    is_sharded = num_ranks > 1 or config.precision.compute != "float32"
    return Sharding(num_ranks, replicas(config, num_ranks), is_sharded)


def memory(
    config: RunConfig, counts: ParameterCounts, sharding: Sharding, micro_batch: int
) -> Memory:
    """Return the memory of one rank at micro batches of ``micro_batch`` samples."""
    shard = -(-counts.total * _FLOAT32 // sharding.dp_shard)  # rounded up: shards are padded
    kept, live = activation_bytes(config)
    parts = {
        "weights": shard,
        "gradients": shard,
        "optimizer": len(STATE[config.optim.name]) * shard,
        "gathered": _gathered(config, counts) if sharding.sharded else 0,
        "activations": micro_batch * (kept + live),
    }
    return Memory(**parts, total=sum(parts.values()))


def _gathered(config: RunConfig, counts: ParameterCounts) -> int:
    compute, reduce = BYTES[config.precision.compute], BYTES[config.precision.reduce]
    blocks = counts.total - counts.rest
    if config.parallel.reshard_after_forward:
        blocks = counts.largest_pair  # the current one, and the next one, which is prefetched
    return compute * (blocks + counts.rest) + (compute + reduce) * counts.largest_block


def communication_bytes(
    config: RunConfig, counts: ParameterCounts, sharding: Sharding, accumulation: int
) -> int:
    """Return the bytes that one GPU sends in one optimizer step, with ring collectives.

    Each micro batch all-gathers every block for forward, and again for backward if it was resharded, and
    reduce-scatters its gradients; the shards are all-reduced between replicas.
    """
    compute, reduce = BYTES[config.precision.compute], BYTES[config.precision.reduce]
    blocks = counts.total - counts.rest
    gathers = blocks * (2 if config.parallel.reshard_after_forward else 1) + counts.rest
    within = (
        (gathers * compute + counts.total * reduce) * (sharding.dp_shard - 1) / sharding.dp_shard
    )
    replicas = sharding.dp_replicate
    between = 2 * counts.total / sharding.dp_shard * reduce * (replicas - 1) / replicas
    return round(accumulation * (within + between))
