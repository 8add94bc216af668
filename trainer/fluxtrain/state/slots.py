"""The slots of a rank: two for its own image and, with a partner, two for another rank's."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fluxtrain.parallel.distributed import Channel, World
from fluxtrain.parallel.sharding import local_part
from fluxtrain.runtime.devices import pin, unpin
from fluxtrain.runtime.files import atomic_write, atomic_write_by_several, folder_size
from fluxtrain.state.free_memory import IMAGE, RECORD, require_room, require_spare
from fluxtrain.state.run_state import RunState
from fluxtrain.state.staging import State

# The image of a rank's training state: the bytes of its part of each tensor, one after the other.
#
# FSDP2 divides the rows (dim 0) of each tensor into equal blocks, of which the last ones are
# shorter or empty. So the place of each row follows from the shapes and the number of shards, and
# an image has no header.


@dataclass(frozen=True)
class Rows:
    """The rows of one whole tensor."""

    count: int
    size: int
    """Bytes of one row."""


@dataclass(frozen=True)
class Shard:
    """Part ``index`` of ``count`` parts of the training state."""

    index: int
    count: int

    def range_of(self, rows: int) -> range:
        """Return the rows of a tensor with ``rows`` rows that are in this part."""
        block = -(-rows // self.count)
        return range(min(self.index * block, rows), min((self.index + 1) * block, rows))


@dataclass(frozen=True)
class Piece:
    """Bytes of one tensor that two parts have in common."""

    tensor: int
    """Position of the tensor in the training state."""
    offset: int
    """First byte in the image of the source."""
    start: int
    """First byte in the target's part of the tensor."""
    size: int


def rows_of(state: State) -> list[Rows]:
    """Return the rows of each tensor of ``state``, over all ranks."""
    return [Rows(t.shape[0], prod(t.shape[1:]) * t.dtype.itemsize) for t in state.values()]


def local_bytes(state: State, shard: Shard) -> list[Tensor]:
    """Return this rank's part of each tensor as bytes, not copied; the rank must hold ``shard``."""
    parts = [local_part(tensor) for tensor in state.values()]
    for part, rows in zip(parts, rows_of(state), strict=True):
        assert len(part) == len(shard.range_of(rows.count)), (part.shape, rows, shard)
    return [_flat(part).view(torch.uint8) for part in parts]


def _flat(tensor: Tensor) -> Tensor:
    """Return the contiguous ``tensor`` with one axis of stride 1, which one element may lack."""
    flat = tensor.view(-1)
    return flat.as_strided(flat.shape, (1,))


def offsets(tensors: Sequence[Rows], shard: Shard) -> list[int]:
    """Return the first byte of each tensor in the image of ``shard``, and the image's size."""
    sizes = (len(shard.range_of(rows.count)) * rows.size for rows in tensors)
    return list(accumulate(sizes, initial=0))


def pieces(tensors: Sequence[Rows], source: Shard, target: Shard) -> list[Piece]:
    """Return what ``target`` reads from the image of ``source``, in the order of the tensors."""
    found = []
    for number, (rows, begin) in enumerate(
        zip(tensors, offsets(tensors, source)[:-1], strict=True)
    ):
        has, needs = source.range_of(rows.count), target.range_of(rows.count)
        first, end = max(has.start, needs.start), min(has.stop, needs.stop)
        if first < end and rows.size:
            offset = begin + (first - has.start) * rows.size
            start = (first - needs.start) * rows.size
            found.append(Piece(number, offset, start, (end - first) * rows.size))
    return found


# Which snapshots continue the run in an output folder: fences those of ranks that were left behind.
#
# All ranks start together, and each start has a number (run_state.py). A snapshot is accepted only if
# the newest start took it, or loaded it and has taken none of its own yet. So neither ranks that
# the others started without nor the memory of a run whose output was deleted can bring back their
# state.


LINEAGE_FILE = ".snapshots.json"


class SnapshotId(NamedTuple):
    """A snapshot: the start of the ranks that took it, and the step."""

    start: int
    step: int


@dataclass(frozen=True)
class Lineage:
    """The newest start of the ranks, and the snapshot that it loaded."""

    start: int = 0
    loaded_start: int = 0
    """0 if it loaded no snapshot."""
    loaded_step: int = 0

    def accepts(self, snapshot: SnapshotId) -> bool:
        """Return whether ``snapshot`` continues this run."""
        loaded = SnapshotId(self.loaded_start, self.loaded_step)
        return self.start > 0 and (snapshot.start == self.start or snapshot == loaded)


def read_lineage(output: Path) -> Lineage:
    """Return the lineage in ``output``; an empty one if there is none or it is unreadable."""
    try:
        values = json.loads((output / LINEAGE_FILE).read_text(encoding="utf-8"))
        return Lineage(**{key: int(value) for key, value in values.items()})
    except (OSError, ValueError, TypeError, AttributeError):
        return Lineage()


def write_lineage(output: Path, lineage: Lineage) -> None:
    with atomic_write_by_several(output / LINEAGE_FILE) as partial:
        partial.write_text(json.dumps(asdict(lineage)), encoding="utf-8")


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
                values = json.loads(path.read_text(encoding="utf-8"))
                copies.append(Copy(**{**values, "name": name, "node": node}))
    return copies


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


CHUNK_BYTES = 1 << 26
"""Most bytes that are reserved between two looks at the free memory."""
_MADV_REMOVE = 9
_LIBC = ctypes.CDLL(None)


class Slot:
    """The file of an image and the record that makes it valid."""

    def __init__(
        self, path: Path, size: int, before_chunk: Callable[[], None] = lambda: None
    ) -> None:
        """Reserve ``size`` bytes at ``path``, without a suffix; raises OSError if they are not free.

        ``before_chunk`` is called before each `CHUNK_BYTES`; nothing is left reserved if it raises.
        """
        self._image, self._record = path.with_suffix(IMAGE), path.with_suffix(RECORD)
        try:
            self._reserve(size, before_chunk)
        except OSError:
            self._image.unlink(missing_ok=True)
            raise
        self.bytes, self._is_pinned = mapped(self._image, size), False
        self._is_dropped, self._valid = False, threading.Lock()
        self.filling = threading.Lock()
        """Is held while the image is filled from the training state: it is freed only afterwards."""

    def _reserve(self, size: int, before_chunk: Callable[[], None]) -> None:
        with self._image.open("wb") as file:
            for offset in range(0, size, CHUNK_BYTES):
                before_chunk()
                # otherwise the first write to a page that is not free would end the process
                os.posix_fallocate(file.fileno(), offset, min(CHUNK_BYTES, size - offset))

    def pin(self) -> None:
        """Pin the memory for copies from a GPU if possible; without it they are slower."""
        self._is_pinned = pin(self.bytes)

    @property
    def exists(self) -> bool:
        """Return whether the file of the image is there."""
        return self._image.exists()

    def invalidate(self) -> None:
        """Remove the record before the image is overwritten."""
        self._record.unlink(missing_ok=True)

    def commit(self, copy: Copy) -> bool:
        """Write the record: the image is whole. Return False, and write none, if the slot is not there."""
        with self._valid:
            if self._is_dropped or not self.exists:
                return False
            with atomic_write(self._record) as partial:
                partial.write_text(json.dumps(asdict(copy)), encoding="utf-8")
            return True

    def drop(self) -> None:
        """Free the memory, and let the image never be valid again; a thread may still write to it.

        May be called again, to free what was written since.
        """
        with self._valid:
            if not self._is_dropped:  # later the files are those of another slot
                self.invalidate()
                self._image.unlink(missing_ok=True)
            self._is_dropped = True
        with self.filling:
            if self._is_pinned:
                unpin(self.bytes)
                self._is_pinned = False
            if len(self.bytes):
                address, size = ctypes.c_void_p(self.bytes.data_ptr()), len(self.bytes)
                _LIBC.madvise(address, ctypes.c_size_t(size), _MADV_REMOVE)


def mapped(image: Path, size: int) -> Tensor:
    """Return the ``size`` bytes of the file ``image``, shared with it; raises OSError if it is shorter."""
    if image.stat().st_size < size:
        raise OSError(f"{image} is shorter than {size} bytes")
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(str(image), shared=True, size=size, dtype=torch.uint8)


def checksum(image: Tensor) -> int:
    """Return the CRC-32 of the bytes of ``image``."""
    content: Any = image.numpy()  # numpy's types do not say that it has a buffer
    return zlib.crc32(content)


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


def source_of(world: World, shard: Shard) -> int | None:
    """Return the rank, of the node before, whose image this rank keeps a copy of; None if there is no need.

    With one node there is no partner. With replicas (HSDP), ranks of another node have the same image.
    """
    if world.num_nodes == 1 or shard.count < world.size:
        return None
    return (world.rank - world.local_size) % world.size


def exchange(channel: Channel, world: World, own: Slot, copy: Copy | None, received: Slot) -> None:
    """Send the image in ``own`` and its record ``copy`` to the next node; store the other in ``received``.

    ``copy`` is None if the image is not valid; then the other node's copy is not either.
    """
    received.invalidate()
    record = torch.empty(MAX_RECORD_BYTES, dtype=torch.uint8)
    channel.shift(_encode(copy), record, world.local_size)
    channel.shift(own.bytes, received.bytes, world.local_size)
    if (text := bytes(record.tolist()).rstrip(b"\0")) != b"":
        received.commit(Copy(**json.loads(text)))


def _encode(copy: Copy | None) -> Tensor:
    text = b"" if copy is None else json.dumps(asdict(copy)).encode()
    return torch.frombuffer(bytearray(text.ljust(MAX_RECORD_BYTES, b"\0")), dtype=torch.uint8)
