"""Whether gathered weights are freed after the forward pass, where the config leaves it open."""

from __future__ import annotations

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.sharding import Sharding
from fluxtrain.data.order import BatchShares
from fluxtrain.distributed import World
from fluxtrain.gpus import memory_of
from fluxtrain.plan.memory import memory

ROOM = 0.8
"""Fraction of a GPU's memory below which a step must stay for all weights to stay gathered."""


def settle_resharding(
    config: RunConfig, num_ranks: int, ranks_per_node: int, gpu_memory: int | None
) -> RunConfig:
    """Return ``config`` with ``parallel.reshard_after_forward`` set, for GPUs with ``gpu_memory`` bytes.

    Weights are freed if that is unknown (None), as for CPUs, or if encoders use a part of it.
    """
    if config.parallel.reshard_after_forward is not None:
        return config
    if gpu_memory is None or config.data.source == "images":
        return _with_resharding(config, True)
    used = _step_bytes(config, num_ranks, ranks_per_node)
    return _with_resharding(config, used >= ROOM * gpu_memory)


def settle_resharding_of(world: World, config: RunConfig) -> RunConfig:
    """Return ``config`` as `settle_resharding` does, for the smallest GPU; every rank must call it."""
    own = memory_of(world.device)
    if own is None or config.parallel.reshard_after_forward is not None:
        return config
    smallest = min(number for (number,) in world.gather_numbers([float(own)]))
    return settle_resharding(config, world.size, world.local_size, int(smallest))


def _step_bytes(config: RunConfig, num_ranks: int, ranks_per_node: int) -> int:
    """Return the peak memory of a rank if all weights stay gathered."""
    kept = _with_resharding(config, False)
    shares = BatchShares.of(config, num_ranks)
    sharding = Sharding.of(config, num_ranks, ranks_per_node)
    return memory(kept, sharding, shares.micro_batch_size, shares.accumulation_steps > 1).total


def _with_resharding(config: RunConfig, is_on: bool) -> RunConfig:
    parallel = config.parallel.model_copy(update={"reshard_after_forward": is_on})
    return config.model_copy(update={"parallel": parallel})
