"""What a run continues from when its ranks start: a snapshot in memory, or the newest checkpoint."""

from __future__ import annotations

import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fluxtrain.contract.process import CHECKPOINTS_FOLDER, CONFIG_FILE, RunPaths
from fluxtrain.contract.run.config import RunConfig, Sharding
from fluxtrain.errors import DataError, FencedError
from fluxtrain.parallel.distributed import Channel, World
from fluxtrain.runtime.progress import Alive
from fluxtrain.state import checkpoint, run_state
from fluxtrain.state.folder import CheckpointFolder, damaged
from fluxtrain.state.free_memory import IMAGE
from fluxtrain.state.run_state import Fence, RunState, claim
from fluxtrain.state.slots import (
    Copy,
    Lineage,
    Piece,
    Shard,
    Slots,
    checksum,
    local_bytes,
    mapped,
    nearest,
    newest_complete,
    pieces,
    read_copies,
    read_lineage,
    rows_of,
    start_folder,
    write_lineage,
)
from fluxtrain.state.snapshots import Snapshots
from fluxtrain.state.staging import State
from fluxtrain.state.verification import find_damage


class Recovery:
    """The newest state of a run, in memory or on storage."""

    def __init__(
        self, config: RunConfig, paths: RunPaths, world: World, alive: Alive = lambda: None
    ) -> None:
        """Fence earlier starts and find it; every rank must call this, ``alive`` is called meanwhile.

        Damaged checkpoints are renamed. Raises ConfigError, before others are fenced, if the newest
        checkpoint is of another run, and DataError if all checkpoints are damaged.
        """
        self._config, self._world, self._alive = config, world, alive
        folder = paths.output / CHECKPOINTS_FOLDER
        run_state.check_continued_run(config, folder)
        self.fence, checkpoints = _take_over(folder, world, read_lineage(paths.output).start)
        self._volume = _shared_volume(config, paths, world)
        self._checkpoint, self._snapshot = self._choose(paths.output, checkpoints)
        if self._checkpoint is not None and self._snapshot is None:
            run_state.check_same_run(config, self._checkpoint)
        if self._volume is not None:
            self._channel = Channel(world)
            begin_start(self._volume, paths.output, world, self.fence, self._snapshot)
        if self._snapshot is not None and (self._snapshot.folder / CONFIG_FILE).exists():
            run_state.check_same_run(config, self._snapshot.folder)

    def _choose(self, output: Path, checkpoints: list[Path]) -> tuple[Path | None, Found | None]:
        """Return the newest of ``checkpoints`` that is whole, and a snapshot if one is not older.

        With a snapshot, the checkpoint is not verified. All ranks return the same.
        """
        damages = list[str]()
        for newest in [*reversed(checkpoints), None]:
            snapshot = self._find_snapshot(output, newest)
            if snapshot or newest is None:
                break
            if not (damage := find_damage(newest, self._world, self._alive)):
                break
            damages += self._keep_damaged(newest, damage)
        for text in damages:
            used = f"step {snapshot.run.step} from memory" if snapshot else newest and newest.name
            ending = f"; {used} is used instead" if used else ""
            print(f"fluxtrain: {text}{ending}", file=sys.stderr, flush=True)
        if newest is None and snapshot is None:
            _require_none_damaged(self.fence.folder, self._world)
        return newest, snapshot

    def _find_snapshot(self, output: Path, newest: Path | None) -> Found | None:
        """Return the newest snapshot that is not older than the checkpoint ``newest``."""
        if self._volume is None:
            return None
        step = run_state.step_of(newest) if newest else 0
        return find(self._volume, output, self._world, step)

    def _keep_damaged(self, newest: Path, damage: str) -> list[str]:
        """Rename ``newest`` on rank 0; return there what is wrong with it."""
        if not self._world.is_main:
            return []
        name = CheckpointFolder(self.fence).keep_damaged(newest)
        return [f"{newest}: damaged ({damage}); kept as {name}"]

    @property
    def is_new(self) -> bool:
        """Return whether the run starts at step 0."""
        return self._checkpoint is None and self._snapshot is None

    @property
    def saved_step(self) -> int | None:
        """Return the step of the newest checkpoint, None if there is none."""
        return run_state.step_of(self._checkpoint) if self._checkpoint else None

    def load(self, state: State, alive: Alive) -> RunState:
        """Copy the newest tensors into ``state`` and return their RunState; step 0 changes nothing."""
        if self._snapshot is not None:
            return self._load_snapshot(self._snapshot, state, alive)
        if self._checkpoint is None:
            return RunState(step=0, samples=0)
        return checkpoint.load(self._checkpoint, state, alive)

    def _load_snapshot(self, found: Found, state: State, alive: Alive) -> RunState:
        try:
            load(found, state, self._shard, self._world, self._channel, alive)
        except Exception:
            remove_others(found.volume)  # the next start must not fail for the same reason
            raise
        if self._world.is_main:
            print(f"fluxtrain: loaded step {found.run.step} from memory", file=sys.stderr)
        return found.run

    def snapshots(
        self,
        state: State,
        run: RunState,
        on_complete: Callable[[int, float], None],
        on_memory: Callable[[int, bool], None],
    ) -> Snapshots | None:
        """Return the writer of snapshots from ``run`` on; None if they are off."""
        if self._volume is None:
            return None
        slots = Slots(self._volume, self.fence.start, self._world, rows_of(state), self._shard)
        return Snapshots(state, slots, self._channel, self._config, run, on_complete, on_memory)

    @property
    def _shard(self) -> Shard:
        """Return this rank's part of the state; ranks of other replicas have the same."""
        world = self._world
        count = Sharding.of(self._config, world.size, world.local_size).dp_shard
        return Shard(world.rank % count, count)


def _take_over(folder: Path, world: World, before: int) -> tuple[Fence, list[Path]]:
    """Return the fence of a start after number ``before``, and the checkpoints in ``folder``.

    All ranks return what rank 0 sees: another node may see an older state of the storage. Rank 0 prints a
    line if another one does not see the fence.
    """

    def claimed() -> tuple[int, list[str]]:
        fence = claim(folder, before)
        CheckpointFolder(fence).take_over()  # before looking: earlier starts commit no more
        return fence.start, [path.name for path in run_state.complete(folder)]

    start, names = world.from_main(claimed)
    fence = Fence(folder, start)
    unseen = [""]
    with suppress(FencedError):
        fence.check()  # opens the file: a lookup may be of an older state
        unseen.clear()
    if world.all_gather(unseen) and world.is_main:
        text = "is not the same on all nodes: no checkpoint will be whole after a restart"
        step = "spec.storage.output, or --output of fluxtrain run, names a volume of all nodes"
        print(f"fluxtrain: {folder} {text}; {step}", file=sys.stderr, flush=True)
    return fence, [folder / name for name in names]


def _require_none_damaged(folder: Path, world: World) -> None:
    """Raise DataError, on all ranks, if a run without a checkpoint had some: it must not start from zero."""
    if names := world.from_main(lambda: damaged(folder)):
        raise DataError(
            f"{folder}: no checkpoint is left, as {', '.join(names)} "
            f"{'is' if len(names) == 1 else 'are'} damaged; restore a checkpoint there, "
            "or remove these folders to start from step 0"
        )


def _shared_volume(config: RunConfig, paths: RunPaths, world: World) -> Path | None:
    """Return the folder for snapshots, None if they are off or a pod has none."""
    if config.checkpoint.memory_every_steps == 0:
        return None
    return paths.snapshots if all(world.all_gather([paths.snapshots])) else None


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
    # another node may see an older state of the storage
    lineage = world.from_main(lambda: read_lineage(output))
    copies = world.all_gather(read_copies(volume, world.node) if world.local_rank == 0 else [])
    while (snapshot := newest_complete(copies, lineage)) and snapshot.step >= saved_step:
        candidates = [copy for copy in copies if copy.snapshot == snapshot]
        mine = [c for c in candidates if c.node == world.node and _reader(c, world) == world.rank]
        damaged = world.all_gather([copy for copy in mine if not _is_whole(volume, copy)])
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
            image = _image(found.volume, copy) if world.rank == source else None
            transfer = _Transfer(image, source, target, channel)
            for piece in pieces(tensors, copy.part, needed):
                transfer.run(piece, parts[piece.tensor], world.rank)
                alive()


@dataclass(frozen=True)
class _Transfer:
    """Moves pieces of an image from rank ``source``, whose node has it, to rank ``target``."""

    image: Tensor | None
    """None on other ranks than the source."""
    source: int
    target: int
    channel: Channel

    def run(self, piece: Piece, part: Tensor, rank: int) -> None:
        """Take this rank's side; the target writes ``piece`` into ``part``, its part of the tensor."""
        if self.image is not None:
            content = self.image[piece.offset : piece.offset + piece.size]
        else:
            content = torch.empty(piece.size, dtype=torch.uint8)
            self.channel.receive(content, self.source)
        if rank == self.target:
            part[piece.start : piece.start + piece.size].copy_(content)
        else:
            self.channel.send(content, self.target)
