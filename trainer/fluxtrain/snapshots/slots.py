"""The slots of a rank: two for its own image and, with a partner, two for another rank's."""

from __future__ import annotations

import errno
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fluxtrain.distributed import World
from fluxtrain.files import folder_size
from fluxtrain.snapshots.copies import start_folder
from fluxtrain.snapshots.free_memory import require_room, require_spare
from fluxtrain.snapshots.image import Rows, Shard, offsets
from fluxtrain.snapshots.partner import source_of
from fluxtrain.snapshots.slot import CHUNK_BYTES, Slot

HOLD_SECONDS = 10.0
"""How long the memory must not have been short before slots are reserved again."""


@dataclass(eq=False)
class Pair:
    """The slots that one snapshot is written to."""

    number: int
    own: Slot
    received: Slot | None
    """For the image of the node before, None without a partner."""
    is_dropped: bool = False

    def drop(self) -> None:
        """Free the memory of both slots; may be called again while they are written."""
        self.is_dropped = True
        for slot in (self.own, self.received):
            if slot is not None:
                slot.drop()

    @property
    def size(self) -> int:
        """Return the bytes of both images."""
        return sum(len(slot.bytes) for slot in (self.own, self.received) if slot is not None)


@dataclass
class Slots:
    """Pairs of slots that are written in turn, so that one snapshot is always whole.

    A thread may drop them at any time; all other calls come from one thread after the other.
    """

    volume: Path
    start: int
    world: World
    tensors: Sequence[Rows]
    shard: Shard
    """The part of the training state that this rank has."""
    next: Pair | None = None
    """The pair for the next snapshot, with an older one; None if it is not reserved."""
    newest: Pair | None = None
    """The pair with the newest snapshot, None if there is none."""
    shortage: str = ""
    """Why slots were dropped, or not reserved, last."""
    _dropped: list[Pair] = field(default_factory=list)
    """Pairs that a thread may still write to."""
    _held_at: float = -HOLD_SECONDS
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def size(self) -> int:
        """Return the bytes of all pairs of this rank."""
        return sum(pair.size for pair in (self.next, self.newest) if pair is not None)

    @property
    def folder(self) -> Path:
        """Return the folder of the slots."""
        return start_folder(self.volume, self.start)

    def require_room(self) -> None:
        """Raise OSError if there is no room for the pair that is missing, or memory was short just now.

        Before a first snapshot there must be room for two pairs. Snapshots of earlier starts are removed once
        it is complete.
        """
        if self.are_held:
            raise OSError(errno.ENOMEM, self.shortage)
        needed = self._node_bytes()
        if self.newest is None:
            needed = max(needed, 2 * needed - sum(map(folder_size, self._earlier())))
        if self.next is None:
            require_room(self.volume, needed)

    def allocate(self) -> None:
        """Reserve the next pair; raise OSError, and reserve nothing, if memory is short."""
        if self.next is not None:
            return
        number = 0 if self.newest is None else 1 - self.newest.number
        self.folder.mkdir(parents=True, exist_ok=True)
        own = self._slot(self.world.rank, number)
        if self.world.device.type == "cuda":
            own.pin()
        source = source_of(self.world, self.shard)
        try:
            received = None if source is None else self._slot(source, number)
        except OSError:
            own.drop()
            raise
        with self._lock:
            self.next = Pair(number, own, received)

    def switch(self) -> None:
        """Write the next snapshot to the other pair: the newest is complete on all ranks."""
        with self._lock:
            self.newest, self.next = self.next, self.newest
        if self.world.local_rank == 0:
            self._remove_earlier()

    @property
    def are_held(self) -> bool:
        """Return whether nothing may be reserved at present."""
        return time.monotonic() - self._held_at < HOLD_SECONDS

    def hold(self, reason: str) -> None:
        """Reserve nothing for `HOLD_SECONDS`, for ``reason``."""
        self.shortage, self._held_at = reason, time.monotonic()

    def drop_one(self, reason: str) -> bool:
        """Free the older pair, else the newest, else snapshots of earlier starts.

        Returns whether it was a pair. Nothing is reserved for `HOLD_SECONDS`, for ``reason``.
        """
        self.hold(reason)
        with self._lock:
            pair = self.next or self.newest
            if pair is None:
                self._remove_earlier()
            elif pair is self.next:
                self.next = None
            else:
                self.newest = None
            self._dropped += [pair] if pair is not None else []
            for dropped in self._dropped:
                dropped.drop()
        return pair is not None

    def drop_all(self, reason: str) -> None:
        """Free all pairs; nothing is reserved for `HOLD_SECONDS`, for ``reason``."""
        while self.drop_one(reason):
            pass

    def free_dropped(self) -> None:
        """Free what was written to pairs after they were dropped: no thread writes to them any more."""
        with self._lock:
            for pair in self._dropped:
                pair.drop()
            self._dropped.clear()

    def _earlier(self) -> set[Path]:
        """Return the folders of the snapshots of other starts."""
        return set(self.volume.glob("start_*")) - {self.folder}

    def _remove_earlier(self) -> None:
        for folder in self._earlier():
            shutil.rmtree(folder, ignore_errors=True)

    def _slot(self, rank: int, number: int) -> Slot:
        shard = Shard(rank % self.shard.count, self.shard.count)
        size = offsets(self.tensors, shard)[-1]
        path = self.folder / f"rank_{rank:05d}_{number}"
        return Slot(path, size, lambda: require_spare(self.volume, CHUNK_BYTES))

    def _node_bytes(self) -> int:
        """Return the bytes of a pair of each rank of this node."""
        largest = offsets(self.tensors, Shard(0, self.shard.count))[-1]
        images = 1 if source_of(self.world, self.shard) is None else 2
        return self.world.local_size * largest * images
