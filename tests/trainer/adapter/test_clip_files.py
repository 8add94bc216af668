"""Adapters of CLIP in LoRA files: diffusers', peft's and ComfyUI's readings of them, and ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline
from safetensors.torch import load_file, save_file
from tests.trainer.adapter.other_loaders import diffusers_model
from tests.trainer.adapter.random_adapters import MODEL, adapter_of, largest_difference, written
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel

from fluxtrain.adapter.file import read_adapter
from fluxtrain.adapter.layouts import LAYOUTS, Layout
from fluxtrain.contract.run.adapter import AdapterConfig, ClipAdapterConfig
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.model.adapted_layers import adapted_layers, is_clip

CLIP = ClipAdapterConfig(rank=3, alpha=6.0)
CONFIG = AdapterConfig(rank=4, alpha=6.0, clip=CLIP)
SMALL = MODEL.model_copy(update={"vec_in_dim": 64})
LAYERS = 12


def clip_model(width: int = 64) -> CLIPTextModel:
    """Return transformers' CLIP with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": LAYERS}
    tokens = {"vocab_size": 100, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    return CLIPTextModel(CLIPTextConfig(num_attention_heads=4, **sizes, **tokens)).eval()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_is_read_back(tmp_path: Path, layout: Layout) -> None:
    adapter = adapter_of(CONFIG, SMALL)
    file = read_adapter(written(tmp_path, adapter, layout, torch.float32))
    assert not file.ignored
    assert file.adapter.keys() == adapter.keys()
    assert sum(map(is_clip, adapter)) == 6 * LAYERS
    for layer, update in adapter.items():
        assert largest_difference(update.delta(), file.adapter[layer].delta()) < 1e-6, layer


def comfy_keys(layout: Layout) -> dict[str, str]:
    """Return ComfyUI's names of CLIP-L's layers in files of ``layout``, by the name in its model."""
    short = {f"self_attn.{each}_proj": f"self_attn_{each}_proj" for each in ("q", "k", "v", "out")}
    short |= {"mlp.fc1": "mlp_fc1", "mlp.fc2": "mlp_fc2"}
    before = "text_model.encoder.layers"
    if layout == "kohya":
        return {
            f"{before}.{index}.{name}": f"lora_te1_text_model_encoder_layers_{index}_{other}"
            for index in range(LAYERS)
            for name, other in short.items()
        }
    names = [f"{before}.{index}.{name}" for index in range(LAYERS) for name in short]
    return {name: f"text_encoder.{name}" for name in names}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_comfyui_uses_every_key_and_computes_our_update(tmp_path: Path, layout: Layout) -> None:
    adapter = adapter_of(CONFIG, SMALL)
    tensors = load_file(written(tmp_path, adapter, layout, torch.float32))
    up, down = ("lora_up", "lora_down") if layout == "kohya" else ("lora_B", "lora_A")
    used = set()
    for name, key in comfy_keys(layout).items():
        matrices = [tensors[f"{key}.{each}.weight"] for each in (up, down)]
        alpha = tensors.get(f"{key}.alpha")
        used |= {f"{key}.{each}.weight" for each in (up, down)}
        used |= set() if alpha is None else {f"{key}.alpha"}
        scale = 1.0 if alpha is None else alpha.item() / len(matrices[1])
        ours = adapter[f"text_encoder.{name}"].delta()
        assert largest_difference(ours, scale * matrices[0] @ matrices[1]) < 1e-6, name
    assert used == {name for name in tensors if name.startswith(("lora_te", "text_encoder"))}


def updates_in(model: Any) -> dict[str, Tensor]:
    """Return the updates of peft's layers in ``model``."""
    found = {}
    for name, layer in model.named_modules():
        if hasattr(layer, "lora_A"):
            up, down = layer.lora_B["ours"].weight.float(), layer.lora_A["ours"].weight.float()
            found[name] = layer.scaling["ours"] * up @ down
    return found


@pytest.mark.parametrize("layout", ["kohya", "diffusers", "ai-toolkit"])
def test_diffusers_loads_our_update(tmp_path: Path, layout: Layout) -> None:
    model, config = SMALL, CONFIG
    if layout == "kohya":  # diffusers' reader of it has fixed widths
        model = ModelConfig(depth=1, depth_single_blocks=1, vec_in_dim=64)
        config = config.model_copy(update={"layers": ["img_attn.proj", "linear2"]})
    adapter = adapter_of(config, model)
    last = "text_encoder.text_model.encoder.layers.11.mlp.fc2"
    adapter[last] = adapter[last].resized(2)  # another rank than that of the others
    clip = clip_model()
    parts = dict.fromkeys(("vae", "tokenizer", "text_encoder_2", "tokenizer_2"))
    pipeline = FluxPipeline(
        scheduler=None, transformer=diffusers_model(model), text_encoder=clip, **parts
    )
    path = written(tmp_path, adapter, layout, torch.float32)
    pipeline.load_lora_weights(path, adapter_name="ours")
    theirs = {name.removeprefix("text_model."): each for name, each in updates_in(clip).items()}
    assert len(theirs) == 6 * LAYERS
    for layer, update in adapter.items():
        if is_clip(layer):
            name = layer.removeprefix("text_encoder.text_model.")
            assert largest_difference(update.delta(), theirs[name]) < 1e-6, layer


def test_t5_stays_left_out_and_clip_alone_is_a_lora(tmp_path: Path) -> None:
    adapter = {n: each for n, each in adapter_of(CONFIG, SMALL).items() if is_clip(n)}
    tensors = load_file(written(tmp_path, adapter, "kohya", torch.float32))
    others = {
        "lora_te3_encoder_block_0_layer_0_SelfAttention_q.alpha": torch.ones(()),
        "lora_te1_text_model_encoder_layers_12_mlp_fc1.alpha": torch.ones(()),
    }
    save_file({**tensors, **others}, tmp_path / "other.safetensors")
    file = read_adapter(tmp_path / "other.safetensors")
    assert set(file.ignored) == set(others)
    assert file.adapter.keys() == adapter.keys()


def test_a_file_of_rank_8_has_the_references_size() -> None:
    """sd-scripts writes 304 modules of the transformer and 72 of CLIP: 75.69 MiB in bfloat16."""
    config = AdapterConfig(rank=8, clip=ClipAdapterConfig(rank=8))
    layers = adapted_layers(ModelConfig(), config)
    assert len(layers) == 304 + 72
    shapes = [shape for layer in layers for shape in layer.shapes.values()]
    values = sum(rows * columns for rows, columns in shapes)
    assert values == 8 * (4_786_176 + 165_888)
    header = 79_369_656 - 2 * values - 4 * len(layers)  # names, spans and the trainer's metadata
    assert 0 < header < 200_000
