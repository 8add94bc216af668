"""peft's adapters in diffusers' model with the values of ours."""

from __future__ import annotations

import torch
from diffusers.loaders import PeftAdapterMixin
from peft import LoraConfig
from torch import Tensor, nn

from fluxtrain.model.layers import AdaptedLayer


def add_peft_adapters(other: nn.Module, model: nn.Module, layers: list[AdaptedLayer]) -> None:
    """Freeze ``other``, named as diffusers', and add the adapters of split ``layers`` of ``model``."""
    assert isinstance(other, PeftAdapterMixin)
    names = {part: layer for layer in layers for part, _ in layer.parts}
    other.add_adapter(
        LoraConfig(
            target_modules=list(names),
            rank_pattern={f"^{part}": layer.rank for part, layer in names.items()},
            alpha_pattern={f"^{part}": layer.alpha for part, layer in names.items()},
            use_dora=layers[0].is_dora,
        )
    )
    with torch.no_grad():
        for name, value in by_peft_names(model, layers, "data").items():
            other.get_parameter(name).copy_(value)


def by_peft_names(model: nn.Module, layers: list[AdaptedLayer], what: str) -> dict[str, Tensor]:
    """Return the values ("data") or gradients ("grad") of our split adapters by peft's names."""
    found = {}
    for layer in layers:
        module = model.get_submodule(layer.name)
        down, up = getattr(module.lora_A, what), getattr(module.lora_B, what)
        parts = zip(layer.parts, down.chunk(len(layer.parts)), strict=True)
        row = 0
        for (part, rows), each in parts:
            found[f"{part}.lora_A.default.weight"] = each
            found[f"{part}.lora_B.default.weight"] = up[row : row + rows]
            if layer.is_dora:
                norms = getattr(module.magnitude, what)
                norms = norms + module.base_magnitude if what == "data" else norms
                found[f"{part}.lora_magnitude_vector.default.weight"] = norms[row : row + rows]
            row += rows
    return found
