"""The weights in one of our checkpoints, verified by its checksums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.contract.validation import validate
from fluxtrain.distributed import World
from fluxtrain.errors import DataError
from fluxtrain.model.tensor_names import Shape, entries
from fluxtrain.progress import Alive
from fluxtrain.run_state import kind_of_result, read_config
from fluxtrain.verification import require_whole_weights

_GROUP_BYTES = 1 << 30  # read at once from a checkpoint, whose shards are reopened for each read


class CheckpointWeights:
    """The model's weights of one of our checkpoints, or their average if the run keeps one."""

    def __init__(self, path: Path) -> None:
        """Read the model's config; raise DataError or ConfigError if it is not valid, or of adapters."""
        self.path = path
        config = read_config(path)
        if config.get("adapter") is not None:
            base = config.get("initial_weights")
            raise DataError(
                f"{path}: it has adapters only, for {base!r}, and not the model's weights"
            )
        self._kind, values = kind_of_result(config), config.get("model")
        self.model = validate(ModelConfig, values, f"{path}/config.json: model")
        self.shapes = {entry.name: entry.shape for entry in entries(self.model)}

    def verify(self, world: World, alive: Alive) -> None:
        """Verify the parts of the files that hold the weights, each rank an equal share."""
        require_whole_weights(self.path, world, alive)

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors, reading a gigabyte of them at once."""
        from fluxtrain.checkpoint import load  # a second of imports

        for group in _groups(names, self.shapes):
            state = {f"{self._kind}.{name}": torch.empty(self.shapes[name]) for name in group}
            load(self.path, state)
            yield from zip(group, state.values(), strict=True)


def _groups(names: Sequence[str], shapes: dict[str, Shape]) -> Iterator[list[str]]:
    total = 0
    keys = {}
    for name in names:
        keys[name] = total // _GROUP_BYTES
        total += 4 * prod(shapes[name])
    for _, group in groupby(names, keys.__getitem__):
        yield list(group)
