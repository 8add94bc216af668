"""The memory of snapshots in a node, from the config alone; without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

from fluxtrain.contract.run.adapter import AdapterConfig
from fluxtrain.contract.run.config import AUTO, RunConfig, Sharding
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.contract.run.optim import QUANTIZED_BLOCK, is_quantized
from fluxtrain.model.layers import Shape, adapted_layers, entries, values_of_shard

_FLOAT32, _FLOAT64 = 4, 8
_SLOTS = 2
"""Images of each part: they are written in turn."""


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
    shapes = list(trained_shapes(config.model, config.adapter))
    weights = sum(values_of_shard(shape, num_shards) * count for shape, count in shapes)
    numbers = config.optim.state_values * weights
    if config.optim.kind.is_factored:
        numbers += _factored_values(shapes, num_shards)
    shared = _FLOAT64 * -(-config.optim.kind.shared_values // num_shards)
    state = _FLOAT32 * numbers + quantized_bytes(config, num_shards) + shared
    return config.precision.weight_bytes * weights + state


def quantized_bytes(config: RunConfig, num_shards: int) -> int:
    """Return the bytes of the optimizer's state in 8 bits in the largest of ``num_shards`` parts."""
    count = config.optim.kind.quantized_values
    return count and count * _bytes_in_8_bits(config.model, config.adapter, num_shards)


@lru_cache(maxsize=16)  # a plan asks for them at each micro batch that it tries
def _bytes_in_8_bits(model: ModelConfig, adapter: AdapterConfig | None, num_shards: int) -> int:
    total = 0
    for shape, count in trained_shapes(model, adapter):
        values = values_of_shard(shape, num_shards)
        if is_quantized(shape):
            blocks = -(-shape[1] // QUANTIZED_BLOCK)
            values += _FLOAT32 * values_of_shard((shape[0], blocks), num_shards)
        else:
            values *= _FLOAT32
        total += values * count
    return total


def trained_shapes(
    model: ModelConfig, adapter: AdapterConfig | None
) -> Iterator[tuple[Shape, int]]:
    """Yield the shapes of the trained parameters, each with the number of parameters that it stands for."""
    if adapter is not None:
        for layer in adapted_layers(model, adapter):
            yield from ((shape, 1) for shape in layer.shapes.values())
        return
    for entry in entries(model.one_of_each):
        yield entry.shape, model.depths.get(entry.name.partition(".")[0], 1)


def _factored_values(shapes: Sequence[tuple[Shape, int]], num_shards: int) -> int:
    """Return the numbers of a factored moment: of each row, and a part of all matrices' columns."""
    rows = sum(values_of_shard(shape[:1], num_shards) * count for shape, count in shapes)
    columns = sum(shape[1] * count for shape, count in shapes if len(shape) == 2)
    return rows + values_of_shard((columns,), num_shards)


_HELD = 2
"""Batches that a rank holds beside those loaded ahead: the one in use, and the one that is being pinned."""
_CAPTION_BYTES = 8192


def loader_bytes(config: RunConfig, num_ranks: int) -> int:
    """Return the most bytes that the loaders of one of at least ``num_ranks`` ranks keep in shared memory.

    (num_workers x prefetch + 2) x samples of a batch x bytes of a sample, where the loaders of training and
    of an evaluation exist at the same time; 0 if the training process loads.
    """
    if config.data.num_workers == 0:
        return 0
    batches = config.data.num_workers * config.data.prefetch + _HELD
    return batches * _samples(config, num_ranks) * sample_bytes(config)


def _samples(config: RunConfig, num_ranks: int) -> int:
    """Return the samples of one batch of each loader that exists at the same time."""
    if config.task == "preprocess":
        return config.preprocess.batch_size
    if config.task == "benchmark":
        return max(config.benchmark.micro_batch_sizes or [config.benchmark.largest_micro_batch])
    if config.task != "train":
        return 0
    share = math.ceil(config.schedule.global_batch_size / num_ranks)
    evaluates = (
        config.evaluation.every_samples or config.evaluation.at_start or config.evaluation.at_end
    )
    most = config.parallel.micro_batch_size
    micro_batch = share if most == AUTO else min(most, share)
    return micro_batch + (config.evaluation.batch_size if evaluates else 0)


def sample_bytes(config: RunConfig) -> int:
    """Return the bytes of one sample in a batch, if its encodings are stored in float32.

    Latent noise and noise, and the image and caption, or the text's encodings, mean and logvar.
    """
    latent = math.prod(config.latent_shape) * _FLOAT32
    if config.data.source == "images":
        return 2 * latent + 3 * config.data.image_size**2 + _CAPTION_BYTES
    text = config.data.text_length * config.model.context_in_dim + config.model.vec_in_dim
    return 4 * latent + text * _FLOAT32
