"""Saves and loads checkpoints; any number of ranks can resume. run_state.py lists their files."""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import (
    CheckpointException,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.errors import DataError, StorageError
from fluxtrain.optim.optimizer import Optimizer
from fluxtrain.runtime import files
from fluxtrain.runtime.files import ChecksummedFile, FileSums, folder_size, write_to_disk
from fluxtrain.runtime.progress import Alive
from fluxtrain.runtime.safetensors import write
from fluxtrain.state.folder import CheckpointFolder
from fluxtrain.state.run_state import CONFIG_FILE, DONE, STATE_FILE, RunState, read_state
from fluxtrain.state.staging import Staging, State

_POLL_SECONDS = 0.5


def training_state(model: nn.Module, optimizer: Optimizer) -> State:
    """Return all tensors that a run trains, by name, not copied: `load` writes into them."""
    state: State = {}
    trained = ((n, p) for n, p in model.named_parameters() if p.requires_grad)
    for name, parameter in trained:
        state[f"model.{name}"] = optimizer.weights[parameter]
        for key, tensor in optimizer.state[parameter].items():
            state[f"optimizer.{key}.{name}"] = tensor
    return state | {f"optimizer.{key}": tensor for key, tensor in optimizer.shared.items()}


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

    folder: CheckpointFolder
    state: State
    config: RunConfig
    is_main: bool
    saved_step: int | None = None
    on_saved: Callable[[int], None] = lambda step: None
    """Called in the writer thread with the step of each complete checkpoint."""
    on_stall: Callable[[float], None] = lambda seconds: None
    """Called with the seconds that the device waited for copies, apart from the time in `save`."""
    alive: Alive = lambda: None
    """Called after each sign of progress, such as bytes written."""
    _target: Path = field(default=Path(), repr=False)
    _group: dist.ProcessGroup | None = field(default=None, repr=False)
    _staging: Staging = field(init=False, repr=False)
    _writer: threading.Thread | None = field(default=None, repr=False)
    _failure: list[BaseException] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        """Create a process group for the writer, whose collectives run in parallel with training's."""
        self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
        every = self.config.checkpoint.every_steps
        self._staging = Staging(self.state, reserve_now=every > 0)

    def save(self, run: RunState) -> None:
        """Save at ``run.step``: copy the tensors, then write them in the background."""
        self.finish()
        self._staging.copy(self.alive)
        self._target = self.folder.partial(run.step)
        self._writer = threading.Thread(target=self._write, args=(run,), name="checkpoint")
        self._writer.start()
        if not self.config.checkpoint.asynchronous:
            self.finish()

    def before_update(self) -> None:
        """Let the next change of the tensors wait, on the device, until they are copied."""
        self._staging.before_change()

    def finish(self) -> None:
        """Wait until the pending checkpoint is complete.

        Raises StorageError if it could not be written, FencedError if a newer start of the run writes.
        """
        if self._writer is not None:
            self._join(self._writer)
            self._writer = None
        self.on_stall(self._staging.take_stall())
        if self._failure:
            error = self._failure.pop()
            self.folder.fence.check()  # ranks that were left behind find their files gone
            raise StorageError(
                f"{self.folder.path}: cannot write a checkpoint ({_reason(error)})"
            ) from error

    def _join(self, writer: threading.Thread) -> None:
        """Wait for ``writer``; call ``alive`` only while the checkpoint's folder grows."""
        size = 0
        while writer.is_alive():
            writer.join(_POLL_SECONDS)
            before, size = size, folder_size(self._target)
            if size != before:
                self.alive()

    def _write(self, run: RunState) -> None:
        target = self._target
        try:
            if self.is_main:
                self.folder.begin(run.step)
            dist.barrier(self._group)
            self.alive()
            writer = ShardWriter(target)
            self._staging.wait()
            dcp.save(self._staging.copies, storage_writer=writer, process_group=self._group)
            self.alive()
            sums = self._gather(writer.sums)
            if self.is_main:
                self._commit(target, run, sums)
            self.saved_step = run.step
            self.on_saved(run.step)
        except BaseException as error:
            self._failure.append(error)

    def _gather(self, own: dict[str, FileSums]) -> dict[str, FileSums]:
        """Return the checksums of the files of all ranks on rank 0, of this rank on others."""
        gathered = [own] * dist.get_world_size(self._group)
        if len(gathered) > 1:
            dist.gather_object(own, gathered if self.is_main else None, group=self._group)
        return {name: sums for files in gathered for name, sums in files.items()}

    def _commit(self, target: Path, run: RunState, sums: dict[str, FileSums]) -> None:
        state, config = json.dumps(asdict(run), indent=1), self.config.model_dump_json(indent=1)
        for name, text in ((STATE_FILE, state), (CONFIG_FILE, config)):
            write_to_disk(target / name, text)
            sums[name] = files.sums_of(text.encode())
        write_to_disk(target / DONE, files.encode(sums))
        self.folder.commit(run.step)
        self.folder.keep_newest(self.config.checkpoint.keep, self.alive)


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else repr(error)


_NAME = "shard-{:05d}-model-00001-of-00001.safetensors"
_METADATA = {"format": "pt", "DCP_VERSION": "1.0"}
_OFFSETS = "DCP_SHARDING_INFO"
"""Key of the file's metadata: where in the whole tensor each part begins."""


class ShardWriter(HuggingFaceStorageWriter):
    """Writes the file of this rank, and keeps its checksums in ``sums``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._folder = folder
        self.sums: dict[str, FileSums] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the tensors of ``plan``; return when they are on the disk."""
        if plan.items:
            name = _NAME.format(plan.storage_data["shard_index"])
            tensors = {item.index.fqn: _tensor(planner, item) for item in plan.items}
            offsets = {item.index.fqn: {"saved_offsets": _offsets(item)} for item in plan.items}
            with ChecksummedFile(self._folder / name) as file:
                write(file, tensors, {**_METADATA, _OFFSETS: json.dumps(offsets)})
                os.fsync(file.fileno())
            self.sums[name] = file.sums
        written: Future[list[WriteResult]] = Future()
        written.set_result([])  # there is no file of metadata that would need them
        return written


def _tensor(planner: SavePlanner, item: WriteItem) -> Tensor:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, Tensor), item
    return tensor


def _offsets(item: WriteItem) -> list[int]:
    assert item.tensor_data is not None, item
    return list(item.tensor_data.chunk.offsets)
