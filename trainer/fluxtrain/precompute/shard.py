"""A shard in the making: room for its encodings on the host, filled batch by batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fluxtrain.data.dataset import Rows
from fluxtrain.data.shard_writer import write_shard
from fluxtrain.data.shards import FIELDS
from fluxtrain.precompute.read_ahead import Job, Piece


@dataclass
class Shard:
    """The samples so far of the shard that ``job`` asks for; unreadable ones are left out and named."""

    job: Job
    rows: Rows | None = None
    keys: list[str] = field(default_factory=list)
    captions: list[str] = field(default_factory=list)
    timesteps: list[int | None] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    def add(self, piece: Piece, encoded: Rows) -> None:
        """Append the samples of ``piece`` that could be read, with their encodings."""
        if self.rows is None:
            most = len(self.job.target.samples(self.job.shard))
            self.rows = Rows(*(_room(getattr(encoded, name), most) for name in FIELDS))
        kept = [row for row, fault in enumerate(piece.faults) if fault is None]
        begin, end = len(self.keys), len(self.keys) + len(kept)
        for name in FIELDS:
            getattr(self.rows, name)[begin:end] = getattr(encoded, name)[kept].cpu()
        self.keys += [piece.keys[row] for row in kept]
        self.captions += [piece.captions[row] for row in kept]
        self.timesteps += [piece.timesteps[row] for row in kept]
        self.dropped += [fault for fault in piece.faults if fault is not None]

    def write(self, staging: Path) -> None:
        """Write the shard and put it in its place, whole or not at all."""
        assert self.rows is not None
        target = self.job.target
        rows = {name: getattr(self.rows, name)[: len(self.keys)] for name in FIELDS}
        notes = {"keys": self.keys, "captions": self.captions, "dropped": self.dropped}
        staged = staging / target.shard_path(self.job.shard).name
        write_shard(staged, rows, self.timesteps, notes)
        target.put(staged)


def _room(encoded: Tensor, count: int) -> Tensor:
    """Return room for ``count`` samples like those in ``encoded``, on the host."""
    return torch.empty(count, *encoded.shape[1:], dtype=encoded.dtype)
