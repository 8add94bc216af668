"""What ranks and nodes send in one optimizer step, with FSDP2 or HSDP and ring collectives, and its time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fluxtrain.contract.run.config import RunConfig, Sharding
from fluxtrain.model.clip import frozen_clip_parameters
from fluxtrain.model.cost import BYTES
from fluxtrain.model.parameters import (
    count_parameters,
    count_trained,
    frozen_blocks,
    gathered_in_fp8,
)
from fluxtrain.parallel.node_memory import trained_shapes

Axis = Literal["dp_replicate", "dp_shard"]
Operation = Literal["all_gather", "all_reduce", "reduce_scatter"]
AXES: tuple[Axis, ...] = ("dp_replicate", "dp_shard")
_FLOAT32, _FLOAT64 = 4, 8
BETWEEN_NODES, WITHIN_NODE = 45e9, 330e9
"""Assumed bytes per second of a GPU's NIC of 400 Gb/s, and of its links within a node of MI300X."""
HOP = 4e-6
"""Assumed seconds until a message is at the next rank of a ring."""


@dataclass(frozen=True)
class Collective:
    """The calls of one collective along one axis of the mesh, in one optimizer step."""

    axis: Axis
    operation: Operation
    calls: int
    content_bytes: int
    """Bytes of the whole, of which each rank has a part before or after: of the gathered weights, of the
    unreduced gradients, or of what is all-reduced."""

    def sent(self, num_ranks: int) -> float:
        """Return the bytes that each of ``num_ranks`` ranks sends in a ring."""
        rounds = 2 if self.operation == "all_reduce" else 1
        return rounds * self.content_bytes * (num_ranks - 1) / num_ranks


def collectives(config: RunConfig, sharding: Sharding, accumulation: int) -> list[Collective]:
    """Return the collectives of a step of ``accumulation`` micro batches, by axis and operation.

    Blocks, and CLIP if it has adapters, are all-gathered for forward, and again for backward if they were
    resharded, the rest once; weights in fp8 with one scale each in fp8, others in the compute dtype;
    gradients are reduce-scattered, each rank's shard is all-reduced between replicas (`all_reduces_each`),
    and the squared norm of all gradients over the shards, and what the optimizer sums, and the largest values
    of weights in fp8 with one scale each. Padding of the shards is sent too.
    """
    counts = count_parameters(config.model, sharding.dp_shard)
    compute, reduce = BYTES[config.precision.compute], BYTES[config.precision.reduce]
    gathers = 2 if config.parallel.reshards else 1
    trained = count_trained(config.model, config.adapter, sharding.dp_shard)
    frozen = frozen_blocks(config, counts)
    blocks = [own + more for own, more in zip(trained.blocks, frozen, strict=True)]
    clip = frozen_clip_parameters(config.model, config.adapter, sharding.dp_shard)
    clip += trained.rest if config.trains_clip else 0
    gathered = (gathers * (sum(blocks) + clip) + counts.rest) * compute
    in_fp8 = [size for block in gathered_in_fp8(config, sharding.dp_shard) for size in block]
    gathered -= gathers * sum(in_fp8) * (compute - 1)
    groups, reduced = trained.groups, trained.total * reduce
    found = list[Collective]()
    if sharding.dp_replicate > 1:
        times = accumulation if all_reduces_each(config) else 1
        shards = times * reduced // sharding.dp_shard
        found.append(Collective("dp_replicate", "all_reduce", times * groups, shards))
    if sharding.dp_shard > 1:
        calls = gathers * (sum(size > 0 for size in blocks) + config.trains_clip) + 1
        sums, sum_bytes = _optimizer_sums(config)
        sums, sum_bytes = sums + bool(in_fp8), sum_bytes + _FLOAT32 * len(in_fp8)
        found += [
            Collective("dp_shard", "all_gather", accumulation * calls, accumulation * gathered),
            Collective("dp_shard", "all_reduce", 1 + sums, _FLOAT32 + sum_bytes),
            Collective("dp_shard", "reduce_scatter", accumulation * groups, accumulation * reduced),
        ]
    return found


def _optimizer_sums(config: RunConfig) -> tuple[int, int]:
    """Return the all-reduces of the optimizer in a step, and their bytes."""
    kind = config.optim.kind
    if not kind.is_factored:
        return int(kind.summed_values > 0), kind.summed_values * _FLOAT64
    shapes = list(trained_shapes(config.model, config.adapter))
    columns = sum(shape[1] * count for shape, count in shapes if len(shape) == 2)
    return 2, _FLOAT32 * (columns + sum(count for _, count in shapes))


def all_reduces_each(config: RunConfig) -> bool:
    """Return whether each micro batch's gradients are reduced between replicas, not their sum at the end.

    FSDP2 keeps that sum in the data type of the reduction. In bfloat16 it would lose what is small beside it;
    reduced each time, gradients are summed in float32.
    """
    return config.precision.reduce != "float32"


def sent_by_rank(config: RunConfig, sharding: Sharding, accumulation: int) -> int:
    """Return the bytes that one rank sends in one optimizer step of ``accumulation`` micro batches."""
    return round(sum(_sent(config, sharding, accumulation, axis) for axis in AXES))


def sent_by_node(config: RunConfig, sharding: Sharding, accumulation: int) -> int:
    """Return the bytes that one node sends to other nodes in one optimizer step.

    A ring in the order of the ranks leaves each of its nodes once. Each node has a part of as many rings
    between the replicas as it has different shards.
    """
    if sharding.num_nodes == 1:
        return 0
    shards = min(sharding.dp_shard, sharding.ranks_per_node)
    within = _sent(config, sharding, accumulation, "dp_shard") if sharding.crosses_nodes else 0
    return round(within + shards * _sent(config, sharding, accumulation, "dp_replicate"))


def sent_within_node(config: RunConfig, sharding: Sharding, accumulation: int) -> int:
    """Return the bytes that the ranks of one node send each other in one optimizer step."""
    ranks = sharding.ranks_per_node * sent_by_rank(config, sharding, accumulation)
    return ranks - sent_by_node(config, sharding, accumulation)


def _sent(config: RunConfig, sharding: Sharding, accumulation: int, axis: Axis) -> float:
    """Return the bytes that one rank sends along ``axis``."""
    num_ranks = sharding.dp_shard if axis == "dp_shard" else sharding.dp_replicate
    found = collectives(config, sharding, accumulation)
    return sum(each.sent(num_ranks) for each in found if each.axis == axis)


def exposed_seconds(
    config: RunConfig, sharding: Sharding, accumulation: int, compute: float
) -> float:
    """Return the seconds of a step that collectives take beyond the ``compute`` seconds that hide them.

    A third of those, the forward passes, hide the first gathers, the rest all others. Reductions between
    replicas run beside those of the shards if these stay within nodes: other links. The first and the last
    call of each kind, and sums of the optimizer, are hidden by nothing.
    """
    gathers = 2 if config.parallel.reshards else 1
    forward = backward = between = bare = 0.0
    for each in collectives(config, sharding, accumulation):
        seconds = _seconds(each, sharding)
        bare += seconds / each.calls
        if each.axis == "dp_replicate":
            between += seconds
        elif each.operation == "all_gather":
            forward += seconds / gathers
            backward += seconds - seconds / gathers
        elif each.operation == "reduce_scatter":
            backward += seconds
    backward = backward + between if sharding.crosses_nodes else max(backward, between)
    return max(0.0, forward - compute / 3) + max(0.0, backward - 2 * compute / 3) + bare


def _seconds(each: Collective, sharding: Sharding) -> float:
    """Return the time of all calls; rings that leave a node at the same time share its NICs."""
    is_shard = each.axis == "dp_shard"
    ranks = sharding.dp_shard if is_shard else sharding.dp_replicate
    rings = 1 if is_shard else min(sharding.dp_shard, sharding.ranks_per_node)
    leaves = sharding.num_nodes > 1 and (sharding.crosses_nodes or not is_shard)
    nics = BETWEEN_NODES * sharding.ranks_per_node / rings
    rate = min(nics, WITHIN_NODE) if leaves else WITHIN_NODE
    hops = (ranks - 1) * (2 if each.operation == "all_reduce" else 1)
    return each.calls * hops * HOP + each.sent(ranks) / rate
