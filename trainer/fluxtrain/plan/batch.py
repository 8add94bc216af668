"""Bytes of batches on the device: the one in use, and those that a GPU copies ahead."""

from __future__ import annotations

import math

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.model.activations import BYTES

_FLOAT32, _INT64 = 4, 8
_PER_SAMPLE = 2 * _FLOAT32 + _INT64
"""Timestep, weight, and the key of its draws on the device."""


def held_bytes(config: RunConfig) -> int:
    """Return the bytes of one sample that exist during its passes, beside the model's own inputs."""
    held = 4 * _latents(config)  # mean, logvar and both kinds of noise
    if config.data.source == "images":
        held += _image(config)
    if _stored(config) != BYTES[config.precision.compute]:
        held += _text(config)  # beside its copy in the compute dtype
    return held + _mask(config) + _PER_SAMPLE


def copied_bytes(config: RunConfig) -> int:
    """Return the bytes of one sample as it is copied to the device."""
    if config.data.source == "images":
        return 2 * _latents(config) + _image(config) + _PER_SAMPLE
    return 4 * _latents(config) + _text(config) + _mask(config) + _PER_SAMPLE


def samples_ahead(config: RunConfig, micro_batch: int) -> int:
    """Return the samples that may be copied ahead: a micro batch, and the first batch of an evaluation."""
    return micro_batch + (config.evaluation.batch_size if config.evaluation.is_on else 0)


def _latents(config: RunConfig) -> int:
    return _FLOAT32 * math.prod(config.latent_shape)


def _mask(config: RunConfig) -> int:
    return _FLOAT32 * math.prod(config.latent_shape[1:]) if config.data.masks else 0


def _image(config: RunConfig) -> int:
    return 3 * config.data.image_size**2


def _stored(config: RunConfig) -> int:
    """Return the bytes of a number of the text's encodings."""
    return _FLOAT32 if config.data.source == "synthetic" else BYTES[config.encoders.precision]


def _text(config: RunConfig) -> int:
    model = config.model
    return (config.data.text_length * model.context_in_dim + model.vec_in_dim) * _stored(config)
