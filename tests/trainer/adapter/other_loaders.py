"""What other tools read LoRA files into: ComfyUI's key map, and diffusers' transformer."""

from __future__ import annotations

import torch
from benchmarks.reference_model import linears
from diffusers import FluxTransformer2DModel

from fluxtrain.contract.run.model import ModelConfig


def comfy_keys(model: ModelConfig) -> dict[str, tuple[str, int, int]]:
    """Return ComfyUI's key map: a file's module, the layer that it changes, and which rows of it."""
    keys = {}
    for name, others in linears(model):
        keys[f"lora_unet_{name.replace('.', '_')}"] = keys[f"diffusion_model.{name}"] = name, 0, -1
        width = model.hidden_size
        for index, other in enumerate(others):
            rows = (name, 0, -1)
            if len(others) > 1:
                length = 4 * width if index == 3 else width
                rows = name, index * width, length
            keys[f"transformer.{other}"] = keys[f"lora_transformer_{other.replace('.', '_')}"] = (
                rows
            )
    return keys


def diffusers_model(model: ModelConfig) -> FluxTransformer2DModel:
    """Return diffusers' transformer without values: adapters are all that is read of it."""
    with torch.device("meta"):
        other = FluxTransformer2DModel(
            in_channels=model.in_channels,
            num_layers=model.depth,
            num_single_layers=model.depth_single_blocks,
            attention_head_dim=model.hidden_size // model.num_heads,
            num_attention_heads=model.num_heads,
            joint_attention_dim=model.context_in_dim,
            pooled_projection_dim=model.vec_in_dim,
            axes_dims_rope=model.axes_dim,
        )
    return other.to_empty(device="cpu")
