"""The memory of snapshots in a node, from the config alone; without torch."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.sharding import Sharding
from fluxtrain.model.adapted_layers import count_adapter_parameters
from fluxtrain.model.tensor_names import Entry, entries

_BYTES = 12
"""Of a parameter: the weight and both moments of AdamW in float32."""
_SLOTS = 2
"""Images of each part: they are written in turn."""
_BLOCKS = {"double_blocks": "depth", "single_blocks": "depth_single_blocks"}


def takes_snapshots(config: RunConfig) -> bool:
    """Return whether the trainers of ``config`` take snapshots in memory."""
    return config.task == "train" and config.checkpoint.memory_every_steps != 0


def snapshot_bytes(config: RunConfig, rank_counts: Sequence[int], ranks_per_node: int) -> int:
    """Return the most memory of snapshots in a node, on any of ``rank_counts`` ranks; 0 without snapshots.

    It has two images of each of its ranks and, with a partner, two of each rank of the node before.
    """
    if not takes_snapshots(config):
        return 0
    smallest = dict[int, int]()  # shards by images of a slot: fewer shards are larger
    for count in rank_counts:
        sharding = Sharding.of(config, count, ranks_per_node)
        images = 2 if sharding.dp_replicate == 1 and sharding.num_nodes > 1 else 1
        smallest[images] = min(sharding.dp_shard, smallest.get(images, sharding.dp_shard))
    of_a_rank = (images * image_bytes(config, shards) for images, shards in smallest.items())
    return _SLOTS * ranks_per_node * max(of_a_rank)


def image_bytes(config: RunConfig, num_shards: int) -> int:
    """Return the bytes of the largest of ``num_shards`` parts of the training state."""
    model = config.model
    if config.adapter is not None:
        return _BYTES * count_adapter_parameters(model, config.adapter, num_shards) // num_shards
    one_of_each = model.model_copy(update={"depth": 1, "depth_single_blocks": 1})
    numbers: dict[str, int] = {kind: getattr(model, field) for kind, field in _BLOCKS.items()}
    values = (
        numbers.get(entry.name.partition(".")[0], 1) * _values_of(entry, num_shards)
        for entry in entries(one_of_each)
    )
    return _BYTES * sum(values)


def _values_of(entry: Entry, num_shards: int) -> int:
    """Return the values in the largest of ``num_shards`` blocks of rows."""
    rows, *columns = entry.shape
    return -(-rows // num_shards) * prod(columns)
