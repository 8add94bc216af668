"""Which copies of images exist, on which nodes, and which snapshot is the newest complete one."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fluxtrain.run_state import RunState
from fluxtrain.snapshots.image import Shard
from fluxtrain.snapshots.lineage import Lineage, SnapshotId

IMAGE, RECORD = ".image", ".json"
"""Suffixes of an image and of the record that makes it valid."""
MAX_RECORD_BYTES = 1 << 12
"""Size of the largest record that is read."""
_START = "start_{:06d}"


@dataclass(frozen=True)
class Copy:
    """A whole image of one shard in the memory of a node."""

    start: int
    step: int
    shard: int
    num_shards: int
    size: int
    """Bytes of the image."""
    checksum: int
    """CRC-32 of the image."""
    run: dict[str, Any]
    """The RunState."""
    name: str = ""
    """The image's path in the node's folder, without the suffix."""
    node: int = 0

    @property
    def snapshot(self) -> SnapshotId:
        """Return the snapshot that this is a part of."""
        return SnapshotId(self.start, self.step)

    @property
    def part(self) -> Shard:
        """Return the part of the training state that this is."""
        return Shard(self.shard, self.num_shards)

    @property
    def run_state(self) -> RunState:
        """Return the state of the run besides its tensors."""
        return RunState(**self.run)


def start_folder(volume: Path, start: int) -> Path:
    """Return the folder in ``volume`` of the snapshots that start ``start`` takes."""
    return volume / _START.format(start)


def read_copies(volume: Path, node: int) -> list[Copy]:
    """Return the valid copies in ``volume``, which is the memory of ``node``."""
    copies = list[Copy]()
    for path in sorted(volume.glob(f"start_*/rank_*{RECORD}")):
        with suppress(OSError, ValueError, TypeError):
            if path.stat().st_size <= MAX_RECORD_BYTES:
                name = str(path.relative_to(volume).with_suffix(""))
                values = {**json.loads(path.read_text()), "name": name, "node": node}
                copies.append(Copy(**values))
    return copies


def encode(copies: Iterable[Copy]) -> list[str]:
    """Return ``copies`` as text for the other ranks."""
    return [json.dumps(asdict(copy)) for copy in copies]


def decode(texts: Iterable[str]) -> list[Copy]:
    """Return the copies of `encode`."""
    return [Copy(**json.loads(text)) for text in texts]


def newest_complete(copies: Iterable[Copy], lineage: Lineage) -> SnapshotId | None:
    """Return the newest snapshot of ``lineage`` of which every shard has a copy; None if there is none."""
    shards = defaultdict[SnapshotId, set[Shard]](set)
    for copy in copies:
        if lineage.accepts(copy.snapshot):
            shards[copy.snapshot].add(copy.part)
    complete = (snapshot for snapshot, parts in shards.items() if _is_whole(parts))
    return max(complete, default=None)


def _is_whole(parts: set[Shard]) -> bool:
    count = next(iter(parts)).count
    return parts == {Shard(index, count) for index in range(count)}


def nearest(copies: Sequence[Copy], node: int) -> Copy:
    """Return which of the ``copies`` of one shard ``node`` reads: its own, else that of another node."""
    own = (copy for copy in copies if copy.node == node)
    return next(own, copies[node % len(copies)])
