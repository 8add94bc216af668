"""An encoded data set that fits the preset micro, and damage to one of its samples."""

from __future__ import annotations

from pathlib import Path

import torch
from cluster.kubectl import Manifest
from tests.faults.target import RUN

from fluxtrain.data.shards import Sample, ShardWriter
from fluxtrain.data.sources import write_empty_text
from fluxtrain.runtime.safetensors import read_header

NUM_SAMPLES, SHARD_SIZE = 8192, 1024
SOURCE: Manifest = {"source": "encoded", "synthetic": {"train_samples": NUM_SAMPLES}}
"""The size is that of the data set, so that the samples of each step are known from the config."""
ENCODED_RUN: Manifest = {**RUN, "data": SOURCE}


def write(root: Path) -> None:
    """Write both data sets and the encodings of the empty prompt; the same in each call."""
    rng = torch.Generator().manual_seed(0)
    for part, count in (("train", NUM_SAMPLES), ("validation", 64)):
        with ShardWriter(root / part, shard_size=SHARD_SIZE, dtype=torch.float32) as writer:
            for index in range(count):
                mean, logvar = torch.randn(4, 4, 4, generator=rng), torch.full((4, 4, 4), -9.0)
                text = torch.randn(4, 16, generator=rng), torch.randn(16, generator=rng)
                writer.add(Sample(key(index), f"caption {index}", *text, mean, logvar))
    write_empty_text(root / "empty.safetensors", torch.zeros(4, 16), torch.zeros(16))


def key(index: int) -> str:
    """Return the key of a sample."""
    return f"key-{index}-"


def damage(root: Path, index: int) -> None:
    """Overwrite a training sample's latent with bytes that are not numbers."""
    number, record = divmod(index, SHARD_SIZE)
    shard = sorted((root / "train").glob("*.safetensors"))[number]
    span = read_header(shard)["mean"]
    with shard.open("r+b") as file:
        file.seek(span.offset + record * span.row_bytes)
        file.write(b"\xff" * 16)
