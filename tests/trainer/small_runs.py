"""Runs of two steps on 21 samples, and their data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.trainer.tiny_encoders import CHANNELS, TOKENS, WIDTH

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import merge
from fluxtrain.data.shards import Sample, ShardWriter
from fluxtrain.data.sources import write_empty_text

NUM_SAMPLES, SHARD_SIZE = 21, 8  # the last batch needs fillers with any number of ranks
ENCODED_RUN = {
    "preset": "micro",
    "data": {"source": "encoded"},
    "schedule": {"global_batch_size": 12, "steps": 2, "warmup_steps": 0},
    "evaluation": {"every_samples": 12, "batch_size": 4},
    "checkpoint": {"every_steps": 0},
    "logging": {"every_steps": 1, "metrics_port": 0},
}
IMAGES = {
    "model": {"in_channels": 4 * CHANNELS, "vec_in_dim": WIDTH, "context_in_dim": WIDTH},
    "data": {"source": "images", "text_length": TOKENS},
    "encoders": {"precision": "float32"},
}
"""Changes to ENCODED_RUN: the same run on images."""


def merge_all(base: dict[str, Any], *changes: dict[str, Any]) -> dict[str, Any]:
    """Return ``base`` with all ``changes``, in order."""
    for change in changes:
        base = merge(base, change)
    return base


def as_closed(config: RunConfig) -> RunConfig:
    """Return ``config`` with the closed division, which only the benchmark's size may have in a file."""
    submitter = config.logging.mlperf.model_copy(update={"division": "closed"})
    logging = config.logging.model_copy(update={"mlperf": submitter})
    return config.model_copy(update={"logging": logging})


def write_encoded(root: Path, validation_value: float = 0.5) -> None:
    """Write both encoded data sets; latents of the validation set are ``validation_value``."""
    for part, value in (("train", 0.5), ("validation", validation_value)):
        with ShardWriter(root / part, shard_size=SHARD_SIZE, dtype=torch.float32) as writer:
            for index in range(NUM_SAMPLES):
                mean, logvar = torch.full((4, 4, 4), value), torch.full((4, 4, 4), -9.0)
                texts = torch.randn(4, 16), torch.randn(16)
                writer.add(Sample(f"key{index}", "a caption", *texts, mean, logvar))
    write_empty_text(root / "empty.safetensors", torch.zeros(4, 16), torch.zeros(16))
