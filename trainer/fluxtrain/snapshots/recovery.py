"""What a run continues from when its ranks start: a snapshot in memory, or the newest checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fluxtrain import checkpoint, run_state
from fluxtrain.checkpoint import Alive, State
from fluxtrain.checkpoint_folder import CheckpointFolder
from fluxtrain.contract.launch import CHECKPOINTS_FOLDER, CONFIG_FILE, RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.replicas import replicas
from fluxtrain.distributed import Channel, World
from fluxtrain.fence import Fence, claim
from fluxtrain.run_state import RunState
from fluxtrain.snapshots import restore
from fluxtrain.snapshots.image import Shard, rows_of
from fluxtrain.snapshots.lineage import read_lineage
from fluxtrain.snapshots.slots import Slots
from fluxtrain.snapshots.writer import Snapshots

_OFF = 0
"""The value of ``checkpoint.memory_every_steps`` that turns snapshots off."""


class Recovery:
    """The newest state of a run, in memory or on storage."""

    def __init__(self, config: RunConfig, paths: RunPaths, world: World) -> None:
        """Fence earlier starts and find it; every rank must call this.

        Raises ConfigError, before others are fenced, if the newest checkpoint is of another run.
        """
        self._config, self._world = config, world
        folder = paths.output / CHECKPOINTS_FOLDER
        if (newest := run_state.latest(folder)) is not None:
            run_state.check_same_run(config, newest)
        self.fence, self._checkpoint = _take_over(folder, world, read_lineage(paths.output).start)
        self._volume, self._snapshot = _shared_volume(config, paths, world), None
        if self._volume is not None:
            self._channel, saved = Channel(world), self.saved_step or 0
            self._snapshot = restore.begin_start(
                self._volume, paths.output, world, self.fence, saved
            )
        if self._snapshot is not None and (self._snapshot.folder / CONFIG_FILE).exists():
            run_state.check_same_run(config, self._snapshot.folder)

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
        run = checkpoint.load(self._checkpoint, state, alive)
        return run if run.is_over(self._config) else replace(run, status="running")

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
        self, state: State, run: RunState, on_complete: Callable[[int, float], None]
    ) -> Snapshots | None:
        """Return the writer of snapshots from ``run`` on; None if they are off."""
        if self._volume is None:
            return None
        slots = Slots(self._volume, self.fence.start, self._world, rows_of(state), self._shard)
        return Snapshots(state, slots, self._channel, self._config, run, on_complete)

    @property
    def _shard(self) -> Shard:
        """Return this rank's part of the state; ranks of other replicas have the same."""
        count = self._world.size // replicas(self._config, self._world.size)
        return Shard(self._world.rank % count, count)


def _take_over(folder: Path, world: World, before: int) -> tuple[Fence, Path | None]:
    """Return the fence of a start after number ``before``, and the newest checkpoint in ``folder``.

    All ranks return what rank 0 sees: another node may see an older state of the storage.
    """
    found = list[str]()
    if world.is_main:
        fence = claim(folder, before)
        CheckpointFolder(
            fence
        ).take_over()  # what earlier starts have not committed by now, they cannot
        newest = run_state.latest(folder)
        found = [str(fence.start), newest.name if newest else ""]
    start, name = world.all_gather(found)
    return Fence(folder, int(start)), folder / name if name else None


def _shared_volume(config: RunConfig, paths: RunPaths, world: World) -> Path | None:
    """Return the folder for snapshots, None if they are off or a pod has none."""
    if config.checkpoint.memory_every_steps == _OFF:
        return None
    volumes = world.all_gather([str(paths.snapshots)] if paths.snapshots else [])
    return paths.snapshots if len(volumes) == world.size else None
