"""The safetensors file that a rank writes of a checkpoint, in the form that torch's reader loads."""

from __future__ import annotations

import json
import os
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fluxtrain.checksums import ChecksummedFile, FileSums
from fluxtrain.safetensors_writer import write

_NAME = "shard-{:05d}-model-00001-of-00001.safetensors"
_METADATA = {"format": "pt", "DCP_VERSION": "1.0"}
_OFFSETS = "DCP_SHARDING_INFO"
"""Key of the file's metadata: where in the whole tensor each part begins."""


class ShardWriter(HuggingFaceStorageWriter):
    """Writes the file of this rank, and keeps its checksums in ``sums``."""

    def __init__(self, folder: Path) -> None:
        """Write to ``folder``."""
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
