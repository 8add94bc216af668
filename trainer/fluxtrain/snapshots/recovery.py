"""What a run continues from when its ranks start: a snapshot in memory, or the newest checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from fluxtrain import checkpoint, run_state
from fluxtrain.checkpoint_folder import CheckpointFolder, damaged
from fluxtrain.contract.launch import CHECKPOINTS_FOLDER, CONFIG_FILE, RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.sharding import Sharding
from fluxtrain.distributed import Channel, World
from fluxtrain.errors import DataError
from fluxtrain.fence import Fence, claim
from fluxtrain.progress import Alive
from fluxtrain.run_state import RunState
from fluxtrain.snapshots import restore
from fluxtrain.snapshots.image import Shard, rows_of
from fluxtrain.snapshots.lineage import read_lineage
from fluxtrain.snapshots.slots import Slots
from fluxtrain.snapshots.writer import Snapshots
from fluxtrain.staging import State
from fluxtrain.verification import find_damage

_OFF = 0
"""The value of ``checkpoint.memory_every_steps`` that turns snapshots off."""


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
            restore.begin_start(self._volume, paths.output, world, self.fence, self._snapshot)
        if self._snapshot is not None and (self._snapshot.folder / CONFIG_FILE).exists():
            run_state.check_same_run(config, self._snapshot.folder)

    def _choose(
        self, output: Path, checkpoints: list[Path]
    ) -> tuple[Path | None, restore.Found | None]:
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

    def _find_snapshot(self, output: Path, newest: Path | None) -> restore.Found | None:
        """Return the newest snapshot that is not older than the checkpoint ``newest``."""
        if self._volume is None:
            return None
        step = run_state.step_of(newest) if newest else 0
        return restore.find(self._volume, output, self._world, step)

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

    def _load_snapshot(self, found: restore.Found, state: State, alive: Alive) -> RunState:
        try:
            restore.load(found, state, self._shard, self._world, self._channel, alive)
        except Exception:
            restore.remove_others(found.volume)  # the next start must not fail for the same reason
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

    All ranks return what rank 0 sees: another node may see an older state of the storage.
    """
    found = list[str]()
    if world.is_main:
        fence = claim(folder, before)
        CheckpointFolder(fence).take_over()  # before looking: earlier starts commit no more
        found = [str(fence.start), *(path.name for path in run_state.complete(folder))]
    start, *names = world.all_gather(found)
    return Fence(folder, int(start)), [folder / name for name in names]


def _require_none_damaged(folder: Path, world: World) -> None:
    """Raise DataError, on all ranks, if a run without a checkpoint had some: it must not start from zero."""
    names = world.all_gather(damaged(folder) if world.is_main else [])
    if names:
        raise DataError(
            f"{folder}: no checkpoint is left, as {', '.join(names)} "
            f"{'is' if len(names) == 1 else 'are'} damaged; restore a checkpoint there, "
            "or remove these folders to start from step 0"
        )


def _shared_volume(config: RunConfig, paths: RunPaths, world: World) -> Path | None:
    """Return the folder for snapshots, None if they are off or a pod has none."""
    if config.checkpoint.memory_every_steps == _OFF:
        return None
    volumes = world.all_gather([str(paths.snapshots)] if paths.snapshots else [])
    return paths.snapshots if len(volumes) == world.size else None
