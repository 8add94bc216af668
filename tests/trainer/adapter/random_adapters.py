"""Random adapters, and files of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fluxtrain.adapter.file import Layout, write_adapter
from fluxtrain.adapter.training_files import trained_adapter
from fluxtrain.adapter.updates import Adapter
from fluxtrain.contract.run.adapter import AdapterConfig
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.model.layers import adapted_layers
from fluxtrain.parallel.distributed import World
from fluxtrain.runtime.progress import Alive

MODEL = ModelConfig(
    hidden_size=64, num_heads=2, axes_dim=(8, 12, 12), depth=2, depth_single_blocks=3
)


def adapter_of(config: AdapterConfig, model: ModelConfig = MODEL) -> Adapter:
    """Return a random adapter."""
    layers, generator = adapted_layers(model, config), torch.Generator().manual_seed(0)
    tensors = {
        f"{layer.name}.{name}": 0.1 * torch.randn(shape, generator=generator)
        for layer in layers
        for name, shape in layer.shapes.items()
    }
    for layer in layers:
        if layer.is_dora:
            tensors[f"{layer.name}.base_magnitude"] = torch.full((layer.outputs,), 2.0)
    return trained_adapter(layers, tensors)


class Base:
    """Weights of the model in memory."""

    path, model = Path("base"), MODEL

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.shapes = {name: tuple(each.shape) for name, each in tensors.items()}

    def verify(self, world: World, alive: Alive) -> None:
        """Verify nothing."""

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, self.tensors[name]) for name in names)


def written(folder: Path, adapter: Adapter, layout: Layout, dtype: torch.dtype) -> Path:
    path = folder / "style.safetensors"
    write_adapter(path, adapter, layout, dtype, is_dev=True)
    return path


def largest_difference(ours: Tensor, theirs: Tensor) -> float:
    return (ours - theirs).abs().max().item()


def require_same(ours: Adapter, theirs: Adapter, tolerance: float = 1e-6) -> None:
    """Assert that both change the same layers in the same way."""
    assert ours.keys() == theirs.keys()
    for layer, update in ours.items():
        assert largest_difference(update.delta(), theirs[layer].delta()) < tolerance, layer
