"""Memory of one rank with FSDP2 or HSDP."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.sharding import Sharding
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


def state_bytes(config: RunConfig) -> int:
    """Return the bytes of one parameter in a checkpoint: weight and optimizer state in float32."""
    return _FLOAT32 * (1 + len(STATE[config.optim.name]))


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
        "gathered": _gathered(config, counts) if _uses_fsdp(config, sharding) else 0,
        "activations": micro_batch * (kept + live),
    }
    return Memory(**parts, total=sum(parts.values()))


def _uses_fsdp(config: RunConfig, sharding: Sharding) -> bool:
    """Return whether parallelize.build_model shards: not on a single rank in float32."""
    return sharding.num_ranks > 1 or config.precision.compute != "float32"


def _gathered(config: RunConfig, counts: ParameterCounts) -> int:
    compute, reduce = BYTES[config.precision.compute], BYTES[config.precision.reduce]
    blocks = counts.total - counts.rest
    if config.parallel.reshard_after_forward:
        blocks = counts.largest_pair  # the current one, and the next one, which is prefetched
    return compute * (blocks + counts.rest) + (compute + reduce) * counts.largest_block
