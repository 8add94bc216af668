"""Random adapters, and files of them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from fluxtrain.adapter.file import Layout, write_adapter
from fluxtrain.adapter.training_files import trained_adapter
from fluxtrain.adapter.updates import Adapter
from fluxtrain.contract.run.adapter import AdapterConfig
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.model.layers import adapted_layers

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


def written(folder: Path, adapter: Adapter, layout: Layout, dtype: torch.dtype) -> Path:
    path = folder / "style.safetensors"
    write_adapter(path, adapter, layout, dtype, is_dev=True)
    return path


def largest_difference(ours: Tensor, theirs: Tensor) -> float:
    return (ours - theirs).abs().max().item()
