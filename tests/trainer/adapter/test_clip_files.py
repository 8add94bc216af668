"""Adapters of CLIP in LoRA files: diffusers', peft's and ComfyUI's readings of them, and ours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.adapters.other_loaders import clip_model, fused, in_comfy, in_diffusers
from safetensors.torch import load_file, save_file
from tests.trainer.adapter.random_adapters import (
    MODEL,
    adapter_of,
    largest_difference,
    require_same,
    written,
)

from fluxtrain.adapter.file import LAYOUTS, Layout, read_adapter
from fluxtrain.adapter.updates import Update
from fluxtrain.cli import main
from fluxtrain.contract.run.adapter import AdapterConfig, ClipAdapterConfig
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.errors import EXIT_OK
from fluxtrain.model.layers import adapted_layers, is_clip

CLIP = ClipAdapterConfig(rank=3, alpha=6.0)
CONFIG = AdapterConfig(rank=4, alpha=6.0, clip=CLIP)
SMALL = MODEL.model_copy(update={"vec_in_dim": 64})
LAYERS = 12


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_is_read_back(tmp_path: Path, layout: Layout) -> None:
    adapter = adapter_of(CONFIG, SMALL)
    last = "text_encoder.text_model.encoder.layers.11.mlp.fc2"
    adapter[last] = adapter[last].resized(2)  # another rank than that of the others
    file = read_adapter(written(tmp_path, adapter, layout, torch.float32))
    assert not file.contents.ignored
    assert sum(map(is_clip, adapter)) == 6 * LAYERS
    require_same(adapter, file.adapter)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_comfyui_uses_every_key_and_computes_our_update(tmp_path: Path, layout: Layout) -> None:
    adapter = adapter_of(CONFIG, SMALL)
    path = written(tmp_path, adapter, layout, torch.float32)
    shapes = {layer: (update.outputs, update.inputs) for layer, update in adapter.items()}
    for layer, theirs in in_comfy(path, SMALL, shapes).items():
        assert largest_difference(adapter[layer].delta(), theirs) < 1e-6, layer


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["kohya", "diffusers", "ai-toolkit"])
def test_diffusers_loads_our_update(tmp_path: Path, layout: Layout) -> None:
    model, config = SMALL, CONFIG
    if layout == "kohya":  # diffusers' reader of it has fixed widths
        model = ModelConfig(depth=1, depth_single_blocks=1, vec_in_dim=64)
        config = config.model_copy(update={"layers": ["img_attn.proj", "linear2"]})
    adapter = adapter_of(config, model)
    last = "text_encoder.text_model.encoder.layers.11.mlp.fc2"
    adapter[last] = adapter[last].resized(2)  # another rank than that of the others
    path = written(tmp_path, adapter, layout, torch.float32)
    theirs = fused(in_diffusers(path, model, clip_model(64)), model)
    assert theirs.keys() == adapter.keys()
    for layer, update in adapter.items():
        assert largest_difference(update.delta(), theirs[layer]) < 1e-6, layer


def test_t5_stays_left_out_and_clip_alone_is_a_lora(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = {n: each for n, each in adapter_of(CONFIG, SMALL).items() if is_clip(n)}
    tensors = load_file(written(tmp_path, adapter, "kohya", torch.float32))
    others = {
        "lora_te3_encoder_block_0_layer_0_SelfAttention_q.alpha": torch.ones(()),
        "lora_te1_text_model_encoder_layers_12_mlp_fc1.alpha": torch.ones(()),
    }
    save_file({**tensors, **others}, tmp_path / "other.safetensors")
    file = read_adapter(tmp_path / "other.safetensors")
    assert set(file.contents.ignored) == set(others)
    assert file.adapter.keys() == adapter.keys()
    t5 = "1 tensors of other text encoders"
    twelfth = "1 tensors of text encoder 1, of layers that CLIP-L does not have"
    assert file.left_out == f"{t5} and {twelfth}"
    for ignored, says in ((list(others)[:1], t5), (list(others)[1:], twelfth)):
        assert replace(file, contents=replace(file.contents, ignored=ignored)).left_out == says
    assert main(["adapter", "info", str(file.path)]) == EXIT_OK
    assert f"left out:      {file.left_out}" in capsys.readouterr().out


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


def test_commands_keep_the_layers_of_clip(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = adapter_of(CONFIG, SMALL)
    source = written(tmp_path, adapter, "kohya", torch.float32)
    converted, small = tmp_path / "converted.safetensors", tmp_path / "small.safetensors"
    arguments = ["--to", "diffusers", "--output", str(converted)]
    assert main(["adapter", "convert", str(source), *arguments]) == EXIT_OK
    require_same(adapter, read_adapter(converted).adapter, 1e-5)
    arguments = ["--rank", "2", "--output", str(small)]
    assert main(["adapter", "resize", str(converted), *arguments]) == EXIT_OK
    resized = read_adapter(small).adapter
    ranks = {update.rank for update in resized.values() if isinstance(update, Update)}
    assert (resized.keys(), ranks) == (adapter.keys(), {2})
    capsys.readouterr()
    assert main(["adapter", "info", str(source)]) == EXIT_OK
    assert "72 of text_encoder" in capsys.readouterr().out
