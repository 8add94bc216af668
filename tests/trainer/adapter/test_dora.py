"""Magnitudes (DoRA) in files: read back, as diffusers, peft and ComfyUI read them, merged, and refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.adapters.other_loaders import comfy_keys, diffusers_model
from benchmarks.reference_model import linears
from diffusers import FluxPipeline
from safetensors.torch import load_file, save_file
from tests.trainer.adapter.random_adapters import (
    MODEL,
    Base,
    adapter_of,
    largest_difference,
    written,
)
from torch import Tensor

from fluxtrain.adapter.file import DORA_LAYOUTS, AdapterFile, Layout, read_adapter, write_adapter
from fluxtrain.adapter.merge import MergedWeights
from fluxtrain.adapter.updates import Adapter, Magnitude, Update
from fluxtrain.cli import main
from fluxtrain.contract.run.adapter import AdapterConfig, AdapterRanks
from fluxtrain.errors import EXIT_USAGE, DataError

FUSED = AdapterConfig(rank=4, alpha=6.0, dora=True, ranks=AdapterRanks(img_attn=3, img_mod=0))
CONFIGS = {"fused": FUSED, "split": FUSED.model_copy(update={"split_qkv": True})}


def weights_of(adapter: Adapter) -> dict[str, Tensor]:
    """Return random weights of the layers."""
    generator = torch.Generator().manual_seed(1)
    return {
        layer: torch.randn(update.outputs, update.inputs, generator=generator)
        for layer, update in adapter.items()
    }


def norms_of(update: object) -> Tensor:
    """Return the magnitudes of all rows."""
    assert isinstance(update, Update)
    magnitude = update.whole().magnitude
    assert magnitude is not None
    return magnitude.values


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("layout", DORA_LAYOUTS)
def test_a_file_in_bfloat16_is_read_back_with_exact_magnitudes(
    tmp_path: Path, layout: Layout, kind: str
) -> None:
    adapter = adapter_of(CONFIGS[kind])
    again = read_adapter(written(tmp_path, adapter, layout, torch.bfloat16)).adapter
    assert again.keys() == adapter.keys()
    for layer, update in adapter.items():
        assert torch.equal(norms_of(update), norms_of(again[layer])), layer
    for layer, weight in weights_of(adapter).items():
        ours, theirs = (each[layer].change(weight) for each in (adapter, again))
        assert largest_difference(ours, theirs) < 0.05, layer


def test_the_updated_rows_have_the_magnitudes_and_directions_of_the_sum() -> None:
    adapter = adapter_of(CONFIGS["split"])
    for layer, weight in weights_of(adapter).items():
        update = adapter[layer]
        assert isinstance(update, Update)
        result, plain = weight + update.change(weight), weight + update.delta()
        assert torch.allclose(result.norm(dim=1), norms_of(update).abs(), rtol=1e-5)
        directions = torch.nn.functional.cosine_similarity(result, plain)
        assert torch.allclose(directions, torch.ones_like(directions), atol=1e-5)


@pytest.mark.parametrize("kind", CONFIGS)
def test_diffusers_and_peft_load_the_weights_that_we_merge(tmp_path: Path, kind: str) -> None:
    adapter = adapter_of(CONFIGS[kind])
    path = written(tmp_path, adapter, "diffusers", torch.float32)
    transformer, bases = diffusers_model(MODEL), weights_of(adapter)
    ours = dict(linears(MODEL))
    for layer, weight in bases.items():
        names = ours[layer]
        width = MODEL.hidden_size
        sizes = [width] * 3 + [len(weight) - 3 * width] if len(names) > 1 else [len(weight)]
        for name, rows in zip(names, torch.split(weight, sizes[: len(names)]), strict=True):
            transformer.get_submodule(name).weight.data = rows.clone()
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    pipeline = FluxPipeline(scheduler=None, transformer=transformer, **parts)
    pipeline.load_lora_weights(path, adapter_name="ours")
    transformer.fuse_lora(adapter_names=["ours"])
    for layer, weight in bases.items():
        modules = [transformer.get_submodule(name) for name in ours[layer]]
        theirs = torch.cat([module.base_layer.weight for module in modules])
        assert largest_difference(weight + adapter[layer].change(weight), theirs) < 1e-5, layer


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("layout", ["kohya", "bfl"])
def test_comfyui_makes_our_weight_times_the_growth_of_its_rows(
    tmp_path: Path, layout: Layout, kind: str
) -> None:
    """ComfyUI divides a column of ``dora_scale`` by the norms of W, not of W + scale B A."""
    adapter = adapter_of(CONFIGS[kind])
    tensors = load_file(written(tmp_path, adapter, layout, torch.float32))
    keys = {
        module: key
        for module, key in comfy_keys(MODEL).items()
        if f"{module}.dora_scale" in tensors
    }
    assert len(keys) == len(adapter)
    for module, (layer, *_) in keys.items():
        names = ("lora_up", "lora_down") if layout == "kohya" else ("lora_B", "lora_A")
        up, down = (tensors[f"{module}.{name}.weight"] for name in names)
        alpha = tensors.get(f"{module}.alpha", torch.tensor(float(len(down))))
        weight = weights_of(adapter)[layer]
        total = weight + alpha / len(down) * up @ down
        scale = tensors[f"{module}.dora_scale"]
        assert scale.shape == (len(weight), 1)
        theirs = total * (scale / weight.norm(dim=1, keepdim=True))
        growth = total.norm(dim=1, keepdim=True) / weight.norm(dim=1, keepdim=True)
        ours = weight + adapter[layer].change(weight)
        assert largest_difference(ours * growth, theirs) < 1e-5, layer


def test_merged_weights_have_the_magnitudes_with_a_strength_and_one_after_another() -> None:
    adapter = adapter_of(FUSED)
    bases, file = weights_of(adapter), AdapterFile(Path("dora"), adapter)
    base = Base({f"{layer}.weight": weight for layer, weight in bases.items()})
    merged = MergedWeights(base, [(file, 0.5), (file, 1.0)])
    for name, found in merged.read(list(base.shapes)):
        layer = name.removesuffix(".weight")
        half = bases[layer] + 0.5 * adapter[layer].change(bases[layer])
        assert torch.allclose(found, half + adapter[layer].change(half), atol=1e-6), name


def test_a_layout_without_magnitudes_and_changes_of_them_are_refused(tmp_path: Path) -> None:
    adapter = adapter_of(FUSED)
    path = tmp_path / "style.safetensors"
    with pytest.raises(
        DataError, match=r"ai-toolkit has no name for magnitudes \(DoRA\): kohya, d"
    ):
        write_adapter(path, adapter, "ai-toolkit", torch.float32)
    layer, update = next(iter(adapter.items()))
    assert isinstance(update, Update)
    changed = replace(update.pieces[0], magnitude=Magnitude(norms_of(update), is_change=True))
    for layout in DORA_LAYOUTS:
        with pytest.raises(DataError, match="has changes of magnitudes"):
            write_adapter(path, {layer: Update(update.outputs, (changed,))}, layout, torch.float32)
    assert not path.exists()


def test_magnitudes_of_some_parts_stay_in_diffusers_layout(tmp_path: Path) -> None:
    source, target = tmp_path / "parts.safetensors", tmp_path / "whole.safetensors"
    name = "transformer.transformer_blocks.0.attn.to_"
    tensors = {}
    for part in "qk":
        tensors[f"{name}{part}.lora_A.weight"] = torch.ones(2, 64)
        tensors[f"{name}{part}.lora_B.weight"] = torch.ones(64, 2)
    tensors[f"{name}q.lora_magnitude_vector"] = torch.ones(64)
    save_file(tensors, source)
    adapter = read_adapter(source).adapter
    with pytest.raises(DataError, match="only 64 of its 192 rows have a magnitude"):
        write_adapter(target, adapter, "kohya", torch.float32)
    write_adapter(target, adapter, "diffusers", torch.float32)
    again = load_file(target)
    assert again.keys() == tensors.keys()


KEY = "lora_unet_single_blocks_0_linear2"
PAIR = {f"{KEY}.lora_down.weight": torch.ones(2, 8), f"{KEY}.lora_up.weight": torch.ones(4, 2)}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            PAIR | {f"{KEY}.dora_scale": torch.ones(1, 7)},
            "neither of its 4 rows nor of its 8 columns",
        ),
        (PAIR | {f"{KEY}.dora_scale": torch.full((4, 1), torch.nan)}, "is not finite"),
        ({f"{KEY}.dora_scale": torch.ones(4, 1)}, "has no up matrix|has no down matrix"),
        (
            {
                f"{KEY}.lokr_w1": torch.ones(2, 2),
                f"{KEY}.lokr_w2": torch.ones(2, 4),
                f"{KEY}.dora_scale": torch.ones(3, 1),
            },
            "neither of its 4 rows nor of its 8 columns",
        ),
    ],
)
def test_magnitudes_that_mean_something_else_are_refused(
    tmp_path: Path, tensors: dict[str, Tensor], message: str
) -> None:
    path = tmp_path / "other.safetensors"
    save_file(tensors, path)
    with pytest.raises(DataError, match=message):
        read_adapter(path)


def test_info_counts_them_and_resize_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, adapter_of(FUSED), "kohya", torch.bfloat16)
    assert main(["adapter", "info", str(path)]) == 0
    output = capsys.readouterr().out
    assert "magnitudes:    27 layers have norms of their rows (DoRA)" in output
    target = tmp_path / "small.safetensors"
    arguments = ["resize", str(path), "--rank", "2", "--output", str(target)]
    assert main(["adapter", *arguments]) == EXIT_USAGE
    assert "merge it, and extract a LoRA" in capsys.readouterr().err
    assert not target.exists()
