"""Random models with random adapters."""

from __future__ import annotations

import torch
from benchmarks.reference_model import random_model
from torch import Tensor, nn

from fluxtrain.contract.run.adapter import AdapterConfig
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.model.flux import Flux
from fluxtrain.model.layers import AdaptedLayer, adapted_layers
from fluxtrain.model.lora import add_adapters, is_adapter, measure


def adapted(
    config: ModelConfig, adapter: AdapterConfig, deviation: float = 0.1
) -> tuple[Flux, list[AdaptedLayer]]:
    """Return a random model with adapters of this standard deviation, and their layers."""
    model, layers = random_model(config), adapted_layers(config, adapter)
    add_adapters(model, layers, torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            measure(model, name, parameter)
            if is_adapter(name):
                parameter.normal_(0, deviation)
    return model, layers


def base_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of ``model`` without its adapters."""
    return {name: value for name, value in model.state_dict().items() if not is_adapter(name)}
