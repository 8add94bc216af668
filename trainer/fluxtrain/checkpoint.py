"""Checkpoints: one folder per step with safetensors shards; any number of ranks can resume.

    checkpoints/step_0000001000/
      shard-*.safetensors   model and optimizer, one part per rank (torch.distributed.checkpoint)
      run.json              RunState
      config.json           the resolved RunConfig
      DONE                  written last by rank 0: a folder without it is ignored

No pickle is written or read. The loader has no state: its position is the step.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import (
    CheckpointException,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.immutable_fields import IMMUTABLE_PATHS, value_at
from fluxtrain.errors import ConfigError, DataError, StorageError
from fluxtrain.files import folder_size

State = dict[str, Tensor]
Alive = Callable[[], None]
_POLL_SECONDS = 0.5
_FOLDER = re.compile(r"step_(\d{10})")


@dataclass(frozen=True)
class RunState:
    """The state of a run besides its tensors."""

    step: int
    samples: int
    status: str = "running"  # running | success | aborted
    eval_loss: float | None = None
    train_seconds: float = 0.0

    def is_over(self, config: RunConfig) -> bool:
        """Return whether the run is complete for ``config``: all steps taken, or its target reached."""
        target = config.evaluation.target_loss
        reached = target is not None and self.eval_loss is not None and self.eval_loss <= target
        return self.status != "running" and (reached or self.step >= config.schedule.steps)


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Return all tensors of a run by name, not copied: `load` writes into them."""
    state: State = {}
    for name, parameter in model.named_parameters():
        state[f"model.{name}"] = parameter.detach()
        for key, tensor in optimizer.state[parameter].items():
            if tensor.dim():  # not the step, which RunState has
                state[f"optimizer.{key}.{name}"] = tensor
    return state


def latest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in ``folder``, None if there is none."""
    complete = _complete(folder)
    return complete[-1] if complete else None


def read_state(checkpoint: Path) -> RunState:
    """Return the RunState of ``checkpoint``; raise DataError if it is unreadable.

    Raises OSError if the checkpoint was removed in the meantime: a restart uses a newer one.
    """
    try:
        return RunState(**json.loads((checkpoint / "run.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        if not (checkpoint / "DONE").exists():
            raise
        raise DataError(f"{checkpoint / 'run.json'}: not the state of a run ({error})") from None


def read_config(checkpoint: Path) -> dict[str, Any]:
    """Return the resolved config that ``checkpoint`` was trained with."""
    try:
        values = json.loads((checkpoint / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{checkpoint / 'config.json'}: not a config ({error})") from None
    if not isinstance(values, dict):
        raise DataError(f"{checkpoint / 'config.json'}: not a config (not an object)")
    return values


def check_same_run(config: RunConfig, checkpoint: Path) -> None:
    """Raise ConfigError if ``config`` and ``checkpoint`` are of different runs."""
    saved, current = read_config(checkpoint), config.model_dump(mode="json")
    for path in IMMUTABLE_PATHS:
        before, now = value_at(saved, path), value_at(current, path)
        if before != now:
            raise ConfigError(
                f"spec.run.{path}",
                now,
                f"the checkpoint {checkpoint.name} was trained with {before!r}; "
                "use another --output for another run",
            )


def load(checkpoint: Path, state: State, alive: Alive = lambda: None) -> RunState:
    """Copy the tensors of ``checkpoint``, of any number of ranks, into ``state`` and return its RunState.

    ``alive`` is called after each tensor.
    """
    run = read_state(checkpoint)
    try:
        reader = HuggingFaceStorageReader(str(checkpoint))
        with warnings.catch_warnings():  # an export is a single process
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(state, storage_reader=reader, planner=_TellingPlanner(alive))
    except (Exception, CheckpointException) as error:  # e.g. a missing key or a truncated header
        raise DataError(f"{checkpoint}: cannot be loaded ({_reason(error)})") from error
    return run


class _TellingPlanner(DefaultLoadPlanner):
    """Torch's default planner, which calls ``alive`` after each tensor."""

    def __init__(self, alive: Alive) -> None:
        super().__init__()
        self._alive = alive

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Call ``alive`` after ``tensor`` was read."""
        super().commit_tensor(read_item, tensor)
        self._alive()


@dataclass
class Checkpoints:
    """Saves the checkpoints of one run in a background thread and keeps the newest ``keep``."""

    folder: Path
    state: State
    config: RunConfig
    is_main: bool
    stall_seconds: float = 0.0
    saved_step: int | None = None
    on_saved: Callable[[int], None] = lambda step: None
    """Called in the writer thread with the step of each complete checkpoint."""
    alive: Alive = lambda: None
    """Called after each sign of progress, such as bytes written."""
    _target: Path = field(default=Path(), repr=False)
    _group: dist.ProcessGroup | None = field(default=None, repr=False)
    _staged: State = field(default_factory=dict, repr=False)
    _writer: threading.Thread | None = field(default=None, repr=False)
    _failure: list[BaseException] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        """Create a process group for the writer, whose collectives run in parallel with training's."""
        self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))

    def save(self, run: RunState) -> None:
        """Save at ``run.step``: copy the tensors, then write them in the background."""
        begin = perf_counter()
        self.finish()
        self._stage()
        self._target = self.folder / f"step_{run.step:010d}"
        self._writer = threading.Thread(target=self._write, args=(run,), name="checkpoint")
        self._writer.start()
        if not self.config.checkpoint.asynchronous:
            self.finish()
        self.stall_seconds = perf_counter() - begin

    def finish(self) -> None:
        """Wait until the pending checkpoint is complete; raise StorageError if it could not be written."""
        if self._writer is not None:
            self._join(self._writer)
            self._writer = None
        if self._failure:
            error = self._failure.pop()
            raise StorageError(
                f"{self.folder}: cannot write a checkpoint ({_reason(error)})"
            ) from error

    def _join(self, writer: threading.Thread) -> None:
        """Wait for ``writer``; call ``alive`` only while the checkpoint's folder grows."""
        size = 0
        while writer.is_alive():
            writer.join(_POLL_SECONDS)
            before, size = size, folder_size(self._target)
            if size != before:
                self.alive()

    def _stage(self) -> None:
        # the buffers are reused: page faults of new ones would cost more than the copy
        if not self._staged:
            self._staged = _host_buffers(self.state)
        for name, tensor in self.state.items():
            _local(self._staged[name]).copy_(_local(tensor), non_blocking=True)
            self.alive()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def _write(self, run: RunState) -> None:
        target = self._target
        try:
            if self.is_main:
                shutil.rmtree(target, ignore_errors=True)
                target.mkdir(parents=True)
            dist.barrier(self._group)
            self.alive()
            writer = HuggingFaceStorageWriter(str(target), save_distributed=True)
            dcp.save(self._staged, storage_writer=writer, process_group=self._group)
            self.alive()
            if self.is_main:
                self._commit(target, run)
            self.saved_step = run.step
            self.on_saved(run.step)
        except BaseException as error:
            self._failure.append(error)

    def _commit(self, target: Path, run: RunState) -> None:
        (target / "run.json").write_text(json.dumps(asdict(run), indent=1))
        (target / "config.json").write_text(self.config.model_dump_json(indent=1))
        (target / "DONE").touch()
        for old in _complete(self.folder)[: -self.config.checkpoint.keep]:
            (old / "DONE").unlink()  # first, so that a partly deleted folder is ignored
            shutil.rmtree(old)
            self.alive()


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else repr(error)


def _complete(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    steps = (path for path in folder.iterdir() if _FOLDER.fullmatch(path.name))
    return sorted(path for path in steps if (path / "DONE").exists())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _host_buffers(state: State) -> State:
    meshes: dict[DeviceMesh, DeviceMesh] = {}
    copies: State = {}
    for name, tensor in state.items():
        local = _local(tensor)
        copy = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            if mesh not in meshes:
                meshes[mesh] = _host_mesh(mesh)
            copy = DTensor.from_local(
                copy,
                meshes[mesh],
                tensor.placements,
                run_check=False,
                shape=tensor.shape,
                stride=tensor.stride(),
            )
        copies[name] = copy
    return copies


def _host_mesh(mesh: DeviceMesh) -> DeviceMesh:
    if mesh.device_type == "cpu":
        return mesh
    return init_device_mesh("cpu", tuple(mesh.shape), mesh_dim_names=mesh.mesh_dim_names)
