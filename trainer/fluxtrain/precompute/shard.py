"""Collects the encodings of one shard on the host and writes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fluxtrain.data.dataset import Encodings
from fluxtrain.data.shard_writer import write_shard
from fluxtrain.data.shards import FIELDS
from fluxtrain.precompute.read_ahead import InputBatch, PendingShard


@dataclass
class ShardBuffer:
    """The encoded samples of ``shard`` so far; unreadable ones are left out and listed in ``dropped``."""

    shard: PendingShard
    encodings: Encodings | None = None
    keys: list[str] = field(default_factory=list)
    captions: list[str] = field(default_factory=list)
    timesteps: list[int | None] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    def add(self, batch: InputBatch, encoded: Encodings) -> None:
        """Append the readable samples of ``batch`` with their encodings."""
        if self.encodings is None:
            count = len(self.shard.output.samples(self.shard.number))
            self.encodings = Encodings(*(_empty(getattr(encoded, name), count) for name in FIELDS))
        kept = [row for row, fault in enumerate(batch.faults) if fault is None]
        begin, end = len(self.keys), len(self.keys) + len(kept)
        for name in FIELDS:
            getattr(self.encodings, name)[begin:end] = getattr(encoded, name)[kept].cpu()
        self.keys += [batch.keys[row] for row in kept]
        self.captions += [batch.captions[row] for row in kept]
        self.timesteps += [batch.timesteps[row] for row in kept]
        self.dropped += [fault for fault in batch.faults if fault is not None]

    def write(self, staging: Path) -> None:
        """Write the shard to ``staging`` and move it to the output folder."""
        assert self.encodings is not None
        tensors = {name: getattr(self.encodings, name)[: len(self.keys)] for name in FIELDS}
        texts = {"keys": self.keys, "captions": self.captions, "dropped": self.dropped}
        staged = staging / self.shard.output.shard_path(self.shard.number).name
        write_shard(staged, tensors, self.timesteps, texts)
        self.shard.output.publish(staged)


def _empty(encoded: Tensor, count: int) -> Tensor:
    """Return an uninitialised host tensor for ``count`` samples like those in ``encoded``."""
    return torch.empty(count, *encoded.shape[1:], dtype=encoded.dtype)
