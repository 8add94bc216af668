"""Memory of one rank and bytes it sends, for FSDP2 over all ranks or in replicated groups (HSDP)."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.replicas import replicas
from fluxtrain.model.activations import BYTES, activation_bytes
from fluxtrain.model.parameters import ParameterCounts

_FLOAT32 = 4
_MOMENTS = 2  # AdamW's running means of gradients and of their squares
STATE_BYTES = _FLOAT32 * (1 + _MOMENTS)
"""Bytes of one parameter in a checkpoint: itself and its moments in float32."""


class Memory(BaseModel):
    """Bytes on one GPU at the peak of a step."""

    model_config = ConfigDict(frozen=True)

    weights: int
    """This rank's shard of the weights, float32."""
    gradients: int
    """This rank's shard of the gradients, float32."""
    optimizer: int
    """This rank's shard of Adam's two moments, float32."""
    gathered: int
    """Whole blocks on their way: weights in the compute dtype, and one block's gradients being reduced."""
    activations: int
    """What forward keeps for backward, for one micro batch."""
    total: int
    """The sum."""


@dataclass(frozen=True)
class Layout:
    """How the parameters lie over the ranks."""

    num_ranks: int
    dp_replicate: int
    sharded: bool  # a single rank in float32 needs no FSDP2 at all

    @property
    def dp_shard(self) -> int:
        """Return the ranks that share one copy of the state."""
        return self.num_ranks // self.dp_replicate


def layout(config: RunConfig, num_ranks: int) -> Layout:
    """Return the layout that parallelize.build_model gives ``num_ranks`` ranks."""
    sharded = num_ranks > 1 or config.precision.compute != "float32"
    return Layout(num_ranks, replicas(config, num_ranks), sharded)


def memory(config: RunConfig, counts: ParameterCounts, where: Layout, micro_batch: int) -> Memory:
    """Return the memory of one rank at micro batches of ``micro_batch`` samples."""
    shard = -(-counts.total * _FLOAT32 // where.dp_shard)  # rounded up: shards are padded
    kept, live = activation_bytes(config)
    parts = {
        "weights": shard,
        "gradients": shard,
        "optimizer": _MOMENTS * shard,
        "gathered": _gathered(config, counts) if where.sharded else 0,
        "activations": micro_batch * (kept + live),
    }
    return Memory(**parts, total=sum(parts.values()))


def _gathered(config: RunConfig, counts: ParameterCounts) -> int:
    compute, reduce = BYTES[config.precision.compute], BYTES[config.precision.reduce]
    blocks = counts.total - counts.rest
    if config.parallel.reshard_after_forward:
        blocks = counts.largest_pair  # the one at work, and the next one on its way
    return compute * (blocks + counts.rest) + (compute + reduce) * counts.largest_block


def communication_bytes(
    config: RunConfig, counts: ParameterCounts, where: Layout, accumulation: int
) -> int:
    """Return the bytes that one GPU sends in one optimizer step, with ring collectives.

    Each micro batch gathers every block for forward, and again for backward where it was freed, and
    scatters its gradients; between replicas the shards are summed.
    """
    compute, reduce = BYTES[config.precision.compute], BYTES[config.precision.reduce]
    blocks = counts.total - counts.rest
    gathers = blocks * (2 if config.parallel.reshard_after_forward else 1) + counts.rest
    within = (gathers * compute + counts.total * reduce) * (where.dp_shard - 1) / where.dp_shard
    replicas = where.dp_replicate
    between = 2 * counts.total / where.dp_shard * reduce * (replicas - 1) / replicas
    return round(accumulation * (within + between))
