"""The batches that data loaders keep in /dev/shm, from the config alone; without torch."""

from __future__ import annotations

import math

from fluxtrain.contract.run.config import RunConfig

_FLOAT32 = 4
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
    return min(config.parallel.micro_batch_size, share) + (
        config.evaluation.batch_size if evaluates else 0
    )


def sample_bytes(config: RunConfig) -> int:
    """Return the bytes of one sample in a batch, if its encodings are stored in float32.

    Latent noise and noise, and the image and caption, or the text's encodings, mean and logvar.
    """
    latent = math.prod(config.latent_shape) * _FLOAT32
    if config.data.source == "images":
        return 2 * latent + 3 * config.data.image_size**2 + _CAPTION_BYTES
    text = config.data.text_length * config.model.context_in_dim + config.model.vec_in_dim
    return 4 * latent + text * _FLOAT32
