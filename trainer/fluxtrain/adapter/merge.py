"""Weights with adapters merged into them, read on demand as any other weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fluxtrain.adapter.file import AdapterFile
from fluxtrain.distributed import World
from fluxtrain.errors import DataError
from fluxtrain.model.adapted_layers import is_clip
from fluxtrain.progress import Alive
from fluxtrain.weights.reader import Weights


class MergedWeights:
    """The tensors of ``base`` plus the updates of adapters, in float32 where an update is added.

    Updates of CLIP are left out.
    Several are added in turn: magnitudes (DoRA) are of the weights with the updates before.
    """

    def __init__(self, base: Weights, adapters: Sequence[tuple[AdapterFile, float]]) -> None:
        """Add each adapter's updates times its strength; DataError if one is of another model."""
        self.path, self.model, self.shapes = base.path, base.model, base.shapes
        self.base, self.adapters = base, adapters
        for file, _ in adapters:
            of_model = ((n, each) for n, each in file.adapter.items() if not is_clip(n))
            for layer, update in of_model:
                shape, own = self.shapes.get(f"{layer}.weight"), (update.outputs, update.inputs)
                if shape != own:
                    has = f"is {list(shape)}" if shape else "does not exist"
                    raise DataError(f"{file.path}: {layer} is {list(own)}; in {base.path} it {has}")

    def verify(self, world: World, alive: Alive) -> None:
        """Verify the base."""
        self.base.verify(world, alive)

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors ``names`` in this order."""
        for name, tensor in self.base.read(names):
            layer = name.removesuffix(".weight")
            updates = [
                (file.adapter[layer], strength)
                for file, strength in self.adapters
                if layer in file.adapter
            ]
            if updates and layer != name:
                total = tensor.float()
                for update, strength in updates:
                    total = torch.add(total, update.change(total), alpha=strength)
                tensor = total
            yield name, tensor
