"""Finds the newest snapshot when the ranks start, and loads it from the memory of the nodes that have it."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Collection
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from fluxtrain.distributed import Channel, World
from fluxtrain.fence import Fence
from fluxtrain.progress import Alive
from fluxtrain.run_state import RunState
from fluxtrain.snapshots.copies import (
    IMAGE,
    Copy,
    decode,
    encode,
    nearest,
    newest_complete,
    read_copies,
    start_folder,
)
from fluxtrain.snapshots.image import Piece, Shard, local_bytes, pieces, rows_of
from fluxtrain.snapshots.lineage import Lineage, read_lineage, write_lineage
from fluxtrain.snapshots.slot import checksum, mapped
from fluxtrain.staging import State


@dataclass(frozen=True)
class Found:
    """A complete snapshot."""

    volume: Path
    copies: tuple[Copy, ...]
    """All of its copies, on all nodes."""

    @property
    def run(self) -> RunState:
        """Return the state of the run besides its tensors."""
        return self.copies[0].run_state

    @property
    def folder(self) -> Path:
        """Return the folder of this node in which its copies are, if it has any."""
        return start_folder(self.volume, self.copies[0].start)


def find(volume: Path, output: Path, world: World, saved_step: int) -> Found | None:
    """Return the newest complete snapshot of step ``saved_step`` or later whose checksums are right, if any.

    It continues the run in ``output``. Every rank must call this.
    """
    lineage = _agree(world, read_lineage(output))
    own = read_copies(volume, world.node) if world.local_rank == 0 else []
    copies = decode(world.all_gather(encode(own)))
    while (snapshot := newest_complete(copies, lineage)) and snapshot.step >= saved_step:
        candidates = [copy for copy in copies if copy.snapshot == snapshot]
        mine = [c for c in candidates if c.node == world.node and _reader(c, world) == world.rank]
        damaged = decode(world.all_gather(encode(c for c in mine if not _is_whole(volume, c))))
        copies = [copy for copy in copies if copy not in damaged]
        if newest_complete(copies, lineage) == snapshot:
            return Found(volume, tuple(copy for copy in candidates if copy not in damaged))
    return None


def begin_start(
    volume: Path, output: Path, world: World, fence: Fence, found: Found | None
) -> None:
    """Let the snapshots that the start of ``fence`` takes count from now on, and ``found``, which it loads.

    Everything else in ``volume`` is removed. Every rank must call this.
    """
    copies = found.copies if found else ()
    if world.is_main:
        fence.check()
        write_lineage(output, Lineage(fence.start, *(copies[0].snapshot if copies else (0, 0))))
    world.barrier()
    if world.local_rank == 0:
        remove_others(volume, {volume / copy.name for copy in copies})
    world.barrier()


def _agree(world: World, lineage: Lineage) -> Lineage:
    """Return what rank 0 read: another node may see an older state of the storage."""
    texts = world.all_gather([" ".join(map(str, astuple(lineage)))] if world.is_main else [])
    return Lineage(*map(int, texts[0].split()))


def _is_whole(volume: Path, copy: Copy) -> bool:
    with suppress(OSError):
        return checksum(_image(volume, copy)) == copy.checksum
    return False


def _image(volume: Path, copy: Copy) -> Tensor:
    return mapped((volume / copy.name).with_suffix(IMAGE), copy.size)


def _reader(copy: Copy, world: World) -> int:
    """Return the rank, of the node that has ``copy``, that reads it for other nodes."""
    return copy.node * world.local_size + copy.shard % world.local_size


def remove_others(volume: Path, kept: Collection[Path] = ()) -> None:
    """Remove all snapshots in ``volume`` but the images of ``kept``, paths without a suffix."""
    for path in volume.glob("start_*/rank_*"):
        if path.with_suffix("") not in kept:
            path.unlink(missing_ok=True)
    for folder in volume.glob("start_*"):
        if not any(kept_image.parent == folder for kept_image in kept):
            shutil.rmtree(folder, ignore_errors=True)


def load(
    found: Found, state: State, shard: Shard, world: World, channel: Channel, alive: Alive
) -> None:
    """Copy the snapshot, of any number of shards, into ``state``; this rank holds its part ``shard``.

    Every rank must call this; ``alive`` is called after each tensor.
    """
    tensors, parts = rows_of(state), local_bytes(state, shard)
    copies = defaultdict[int, list[Copy]](list)
    for copy in found.copies:
        copies[copy.shard].append(copy)
    for target in range(world.size):
        needed = Shard(target % shard.count, shard.count)
        for index in sorted(copies):
            copy = nearest(copies[index], target // world.local_size)
            is_local = copy.node == target // world.local_size
            source = target if is_local else _reader(copy, world)
            if world.rank not in (source, target):
                continue
            transfer = _Transfer(found.volume, copy, source, target, channel)
            for piece in pieces(tensors, copy.part, needed):
                transfer.run(piece, parts[piece.tensor], world.rank)
                alive()


@dataclass(frozen=True)
class _Transfer:
    """Moves pieces of ``copy`` from rank ``source``, whose node has it, to rank ``target``."""

    volume: Path
    copy: Copy
    source: int
    target: int
    channel: Channel

    @cached_property
    def _image(self) -> Tensor:
        return _image(self.volume, self.copy)

    def run(self, piece: Piece, part: Tensor, rank: int) -> None:
        """Take this rank's side; the target writes ``piece`` into ``part``, its part of the tensor."""
        if rank == self.source:
            content = self._image[piece.offset : piece.offset + piece.size]
        else:
            content = torch.empty(piece.size, dtype=torch.uint8)
            self.channel.receive(content, self.source)
        if rank == self.target:
            part[piece.start : piece.start + piece.size].copy_(content)
        else:
            self.channel.send(content, self.target)
