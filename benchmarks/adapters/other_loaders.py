"""What other tools read LoRA files into: ComfyUI by its key map, diffusers and peft by their own loaders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from benchmarks.reference_model import linears, without_values
from diffusers import FluxPipeline, FluxTransformer2DModel
from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel

from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.model.layers import CLIP_LAYERS, TEXT_ENCODER, clip_linear_layers

METADATA = "lora_adapter_metadata"
PREFIX = "transformer."
CLIP = f"{TEXT_ENCODER}."
NAME = "ours"
Rows = tuple[str, int, int]
"""A layer, its first row, and the number of rows; -1: all."""


def comfy_keys(model: ModelConfig) -> dict[str, Rows]:
    """Return ComfyUI's key map: a file's module, the layer that it changes, and which rows of it."""
    keys = {}
    for layer in clip_linear_layers(model.vec_in_dim):
        name = layer.removeprefix(CLIP).replace(".", "_")
        keys[f"lora_te1_{name}"] = keys[layer] = layer, 0, -1
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


def in_comfy(
    path: Path, model: ModelConfig, outputs: Mapping[str, tuple[int, int]]
) -> dict[str, Tensor]:
    """Return the updates of layers of the shapes ``outputs`` as ComfyUI computes them.

    Raises AssertionError if a tensor of the file is not used.
    """
    tensors, used = load_file(path), set[str]()
    updates = {name: torch.zeros(shape) for name, shape in outputs.items()}
    for module, (layer, first, length) in comfy_keys(model).items():
        own = {name: tensors[name] for name in tensors if name.startswith(f"{module}.")}
        if own:
            end = None if length < 0 else first + length
            updates[layer][first:end] += _comfy_update(module, own)
            used.update(own)
    assert used == set(tensors), sorted(set(tensors) - used)
    return updates


def _comfy_update(module: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the update that ComfyUI makes of all ``tensors`` of ``module``; alpha counts with a rank."""
    own = {name.removeprefix(f"{module}."): tensor.float() for name, tensor in tensors.items()}
    alpha, rank = own.pop("alpha", None), None
    if any(name.startswith("lokr_") for name in own):
        factors = []
        for name in ("lokr_w1", "lokr_w2"):
            if f"{name}_a" in own:
                low = own.pop(f"{name}_b")
                rank = len(low)
                factors.append(own.pop(f"{name}_a") @ low)
            else:
                factors.append(own.pop(name))
        update = torch.kron(*factors)
    elif "hada_w1_a" in own:
        one, two = (
            own.pop(f"hada_w{i}_a") @ own["hada_w1_b" if i == 1 else "hada_w2_b"] for i in (1, 2)
        )
        rank = len(own.pop("hada_w1_b"))
        own.pop("hada_w2_b")
        update = one * two
    else:
        up, down = ("lora_B", "lora_A") if "lora_B.weight" in own else ("lora_up", "lora_down")
        low = own.pop(f"{down}.weight")
        rank = len(low)
        update = own.pop(f"{up}.weight") @ low
    assert not own, sorted(own)
    return update if rank is None or alpha is None else update * (alpha.item() / rank)


def in_diffusers(
    path: Path, model: ModelConfig, clip: CLIPTextModel | None = None
) -> dict[str, Tensor]:
    """Return the updates of diffusers' layers, and of ``clip``'s, after its ``load_lora_weights``."""
    transformer = diffusers_model(model)
    parts = dict.fromkeys(("vae", "tokenizer", "text_encoder_2", "tokenizer_2"))
    pipeline = FluxPipeline(scheduler=None, transformer=transformer, text_encoder=clip, **parts)
    pipeline.load_lora_weights(path, adapter_name=NAME)
    of_clip = {} if clip is None else _peft_updates(clip)
    inside = "text_model."  # not in the names of all versions of transformers
    named = {f"{CLIP}{inside}{name.removeprefix(inside)}": each for name, each in of_clip.items()}
    return _peft_updates(transformer) | named


def in_peft(path: Path, model: ModelConfig) -> dict[str, Tensor]:
    """Return the updates of diffusers' layers after peft's own loader, by the file's settings of peft.

    Raises AssertionError if peft does not use a tensor, or the file has no settings.
    """
    tensors = {name.removeprefix(PREFIX): each for name, each in load_file(path).items()}
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    settings = json.loads(metadata[METADATA])
    own = {name.removeprefix(PREFIX): each for name, each in settings.items()}
    transformer = diffusers_model(model)
    inject_adapter_in_model(LoraConfig(**own), transformer, adapter_name=NAME)
    result: Any = set_peft_model_state_dict(transformer, tensors, adapter_name=NAME)
    assert not result.unexpected_keys, result.unexpected_keys
    assert not [name for name in result.missing_keys if "lora_" in name]
    return _peft_updates(transformer)


def _peft_updates(transformer: nn.Module) -> dict[str, Tensor]:
    """Return scaling x B A of all layers with an adapter."""
    updates = {}
    for name, layer in transformer.named_modules():
        if hasattr(layer, "lora_A"):
            up, down = layer.lora_B[NAME].weight.float(), layer.lora_A[NAME].weight.float()
            updates[name] = (layer.scaling[NAME] * up @ down).detach()
    return updates


def fused(theirs: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Return the updates of diffusers' layers as those of ours, whose rows theirs are parts of."""
    of_model = {
        name: torch.cat([theirs[other] for other in others])
        for name, others in linears(model)
        if others[0] in theirs
    }
    return of_model | {name: each for name, each in theirs.items() if name.startswith(CLIP)}


def clip_model(width: int) -> CLIPTextModel:
    """Return transformers' CLIP with as many layers as CLIP-L, and random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": CLIP_LAYERS}
    tokens = {"vocab_size": 100, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    return CLIPTextModel(CLIPTextConfig(num_attention_heads=4, **sizes, **tokens)).eval()


def diffusers_model(model: ModelConfig) -> FluxTransformer2DModel:
    """Return diffusers' transformer without values: adapters are all that is read of it."""
    return without_values(model).to_empty(device="cpu")
