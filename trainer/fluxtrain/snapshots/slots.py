"""The slots of a rank: two for its own image and, with a partner, two for another rank's."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fluxtrain.distributed import World
from fluxtrain.files import folder_size
from fluxtrain.snapshots.copies import start_folder
from fluxtrain.snapshots.free_memory import require_free
from fluxtrain.snapshots.image import Rows, Shard, offsets
from fluxtrain.snapshots.partner import source_of
from fluxtrain.snapshots.slot import Slot


@dataclass(frozen=True)
class Pair:
    """The slots that one snapshot is written to."""

    own: Slot
    received: Slot | None
    """For the image of the node before, None without a partner."""


@dataclass
class Slots:
    """Pairs of slots that are written in turn, so that one snapshot is always whole."""

    volume: Path
    start: int
    world: World
    tensors: Sequence[Rows]
    shard: Shard
    """The part of the training state that this rank has."""
    _pairs: list[Pair] = field(default_factory=list)
    _turn: int = 0

    @property
    def next(self) -> Pair:
        """Return the pair that does not hold the newest snapshot."""
        return self._pairs[self._turn]

    @property
    def are_reserved(self) -> bool:
        """Return whether both pairs are there."""
        return len(self._pairs) == 2

    @property
    def folder(self) -> Path:
        """Return the folder of the slots."""
        return start_folder(self.volume, self.start)

    def allocate(self) -> None:
        """Reserve another pair; raise OSError if memory is short.

        Snapshots of earlier starts must be gone when the second one is reserved.
        """
        number = len(self._pairs)
        needed = self._node_bytes() * (2 - number)
        if (
            number == 0
        ):  # the snapshot that was loaded is removed before the second pair is reserved
            needed -= _size_of(self.volume)
        require_free(self.volume, needed)
        self.folder.mkdir(parents=True, exist_ok=True)
        source = source_of(self.world, self.shard)
        received = None if source is None else self._slot(source, number)
        self._pairs.append(Pair(self._slot(self.world.rank, number), received))
        self._turn = number

    def switch(self) -> None:
        """Write the next snapshot to the other pair: the newest is complete on all ranks."""
        self._turn = 1 - self._turn
        if self.world.local_rank == 0:
            for folder in set(self.volume.glob("start_*")) - {self.folder}:
                shutil.rmtree(folder, ignore_errors=True)

    def free(self) -> None:
        """Remove this rank's snapshots."""
        for slot in (slot for pair in self._pairs for slot in (pair.own, pair.received) if slot):
            slot.unpin()
        self._pairs.clear()
        for path in self.folder.glob("*"):
            path.unlink(missing_ok=True)

    def _slot(self, rank: int, number: int) -> Slot:
        shard = Shard(rank % self.shard.count, self.shard.count)
        size = offsets(self.tensors, shard)[-1]
        slot = Slot(self.folder / f"rank_{rank:05d}_{number}", size)
        if self.world.device.type == "cuda":
            slot.pin()
        return slot

    def _node_bytes(self) -> int:
        """Return the bytes of a pair of each rank of this node."""
        largest = offsets(self.tensors, Shard(0, self.shard.count))[-1]
        images = 1 if source_of(self.world, self.shard) is None else 2
        return self.world.local_size * largest * images


def _size_of(volume: Path) -> int:
    """Return the bytes of the snapshots in ``volume``; files that vanish meanwhile count as 0."""
    return sum(folder_size(folder) for folder in volume.glob("start_*"))
