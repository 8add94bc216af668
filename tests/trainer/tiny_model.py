"""A small FLUX transformer: its config, random weights, and the file that BFL publishes such weights in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.trainer.tiny_encoders import CHANNELS, WIDTH

from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.model.flux import Flux
from fluxtrain.parallel.parallelize import initial_weights, load_weights

CPU = torch.device("cpu")


def tiny_model(**changes: Any) -> ModelConfig:
    """Return a config that takes the tiny encoders' outputs: two blocks of two heads, with ``changes``."""
    fields: dict[str, Any] = {
        "in_channels": 4 * CHANNELS,
        "vec_in_dim": WIDTH,
        "context_in_dim": WIDTH,
        "hidden_size": 64,
        "num_heads": 2,
        "depth": 1,
        "depth_single_blocks": 1,
        "axes_dim": (8, 12, 12),
    }
    return ModelConfig(**fields | changes)


SMALL = tiny_model(vec_in_dim=40, context_in_dim=48, depth=2, depth_single_blocks=3)
"""A model whose input widths and numbers of blocks all differ."""


def initialised(config: ModelConfig, seed: int = 0) -> Flux:
    flux = Flux(config)
    load_weights(flux, initial_weights(flux, seed, CPU), CPU)
    return flux


def random_flux(config: ModelConfig) -> Flux:
    """Return a model in evaluation mode whose parameters all have standard deviation 0.1."""
    torch.manual_seed(0)
    flux = Flux(config)
    with torch.no_grad():
        for parameter in flux.parameters():
            parameter.normal_(0, 0.1)
    return flux.eval()


def save_flux(flux: Flux, folder: Path) -> Path:
    """Write the weights of ``flux`` to ``folder``/weights.safetensors; return that path."""
    path = folder / "weights.safetensors"
    save_file(flux.state_dict(), path, metadata={"axes_dims_rope": str(list(flux.axes_dim))})
    return path
