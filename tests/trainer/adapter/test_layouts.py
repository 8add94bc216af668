"""LoRA files in all layouts: what diffusers, peft and ComfyUI's key map make of them is our update."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.adapters.other_loaders import fused, in_comfy, in_diffusers, in_peft
from benchmarks.reference_model import linears
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.trainer.adapter.random_adapters import (
    MODEL,
    adapter_of,
    largest_difference,
    require_same,
    written,
)
from torch import Tensor

from fluxtrain.adapter.file import DTYPES, LAYOUTS, Layout, read_adapter, write_adapter
from fluxtrain.contract.run.adapter import AdapterConfig, AdapterRanks
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.errors import DataError

pytestmark = pytest.mark.slow

TRUE_WIDTH = ModelConfig(depth=1, depth_single_blocks=1)
RANKS = AdapterRanks(img_attn=3, txt_mlp=2, single=5, img_mod=1)
FEW_LAYERS = AdapterRanks(img_mlp=0, txt_attn=0, txt_mlp=0, img_mod=0, txt_mod=0, single=5)
FUSED = AdapterConfig(rank=4, alpha=6.0, ranks=RANKS)
CONFIGS = {
    "fused": FUSED,
    "split": FUSED.model_copy(update={"split_qkv": True}),
    "some": AdapterConfig(rank=2, alpha=8.0, double_blocks="1", ranks=AdapterRanks(single_mod=0)),
}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_is_read_back(tmp_path: Path, layout: Layout, kind: str) -> None:
    adapter = adapter_of(CONFIGS[kind])
    require_same(adapter, read_adapter(written(tmp_path, adapter, layout, torch.float32)).adapter)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_converted_file_has_the_same_update(tmp_path: Path, layout: Layout, dtype: str) -> None:
    adapter = adapter_of(CONFIGS["split"])
    first = read_adapter(written(tmp_path, adapter, layout, DTYPES[dtype]))
    assert first.dtype == DTYPES[dtype]
    for target in LAYOUTS:
        second = read_adapter(written(tmp_path, first.adapter, target, torch.float32))
        require_same(first.adapter, second.adapter)


def test_kohyas_file_has_its_names_shapes_and_alphas(tmp_path: Path) -> None:
    for kind, times in (("fused", (1, 1)), ("split", (3, 4))):
        tensors = load_file(written(tmp_path, adapter_of(CONFIGS[kind]), "kohya", torch.bfloat16))
        assert len(tensors) == 3 * (2 * 10 + 3 * 3)
        qkv, linear1 = "lora_unet_double_blocks_1_img_attn_qkv", "lora_unet_single_blocks_2_linear1"
        for name, rank, rows, count in ((qkv, 3, 192, times[0]), (linear1, 5, 448, times[1])):
            assert tensors[f"{name}.lora_down.weight"].shape == (rank * count, 64)
            assert tensors[f"{name}.lora_up.weight"].shape == (rows, rank * count)
            assert tensors[f"{name}.lora_up.weight"].dtype == torch.bfloat16
            assert tensors[f"{name}.alpha"].item() == pytest.approx(6.0 * count)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_comfyui_uses_every_key_and_computes_our_update(
    tmp_path: Path, layout: Layout, kind: str
) -> None:
    adapter = adapter_of(CONFIGS[kind])
    path = written(tmp_path, adapter, layout, torch.float32)
    shapes = {layer: (update.outputs, update.inputs) for layer, update in adapter.items()}
    for layer, theirs in in_comfy(path, MODEL, shapes).items():
        assert largest_difference(adapter[layer].delta(), theirs) < 1e-6, layer


@pytest.mark.parametrize("layout", ["kohya", "diffusers", "ai-toolkit"])
@pytest.mark.parametrize("kind", ["fused", "split"])
def test_diffusers_loads_our_update(tmp_path: Path, layout: Layout, kind: str) -> None:
    model, config = MODEL, CONFIGS[kind]
    if layout == "kohya":  # diffusers' reader of it has fixed widths
        model, config = TRUE_WIDTH, config.model_copy(update={"ranks": FEW_LAYERS})
    adapter = adapter_of(config, model)
    path = written(tmp_path, adapter, layout, torch.float32)
    theirs, ours = in_diffusers(path, model), dict(linears(model))
    assert len(theirs) == sum(len(ours[layer]) for layer in adapter)
    for layer, update in fused(theirs, model).items():
        assert largest_difference(adapter[layer].delta(), update) < 1e-6, layer


@pytest.mark.parametrize("kind", CONFIGS)
def test_pefts_own_loader_uses_every_key_and_computes_our_update(tmp_path: Path, kind: str) -> None:
    adapter = adapter_of(CONFIGS[kind])
    theirs = fused(in_peft(written(tmp_path, adapter, "diffusers", torch.float32), MODEL), MODEL)
    assert theirs.keys() == adapter.keys()
    for layer, update in theirs.items():
        assert largest_difference(adapter[layer].delta(), update) < 1e-6, layer


def test_the_metadata_are_kohyas_with_right_hashes(tmp_path: Path) -> None:
    path = written(tmp_path, adapter_of(FUSED), "kohya", torch.bfloat16)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    expected = {
        "ss_network_module": "networks.lora_flux",
        "ss_base_model_version": "flux1",
        "ss_network_dim": "4",
        "ss_network_alpha": "6.0",
        "ss_output_name": "style",
        "modelspec.architecture": "flux-1-dev/lora",
        "modelspec.title": "style",
        "modelspec.sai_model_spec": "1.0.1",
    }
    assert expected.items() <= metadata.items()
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    assert metadata["sshs_model_hash"] == hashlib.sha256(content[begin:]).hexdigest()
    assert len(metadata["sshs_legacy_hash"]) == 8
    assert (
        path.read_bytes()
        == written(tmp_path, adapter_of(FUSED), "kohya", torch.bfloat16).read_bytes()
    )


def test_a_file_of_peft_with_its_own_alpha_is_read_with_it(tmp_path: Path) -> None:
    path = tmp_path / "peft.safetensors"
    name = "transformer.transformer_blocks.0.attn.to_out.0"
    tensors = {f"{name}.lora_A.weight": torch.ones(4, 8), f"{name}.lora_B.weight": torch.ones(8, 4)}
    config = {"transformer.r": 4, "transformer.lora_alpha": 2, "transformer.alpha_pattern": {}}
    save_file(tensors, path, {"lora_adapter_metadata": json.dumps(config)})
    (update,) = read_adapter(path).adapter.values()
    assert torch.equal(update.delta(), torch.full((8, 8), 2.0))


GOOD = "lora_unet_single_blocks_0_linear2"
PAIR = {f"{GOOD}.lora_down.weight": torch.ones(2, 8), f"{GOOD}.lora_up.weight": torch.ones(4, 2)}
BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "it has no LoRA of the transformer"),
    ({"lora_te1_x.lora_down.weight": torch.ones(1, 1)}, "it has no LoRA of the transformer"),
    (PAIR | {"img_in.weight": torch.ones(2, 2)}, "1 key is unknown: img_in.weight; --skip-unknown leaves"),
    ({"lora_unet_down_blocks_0_attn.lora_up.weight": torch.ones(1, 1)}, "it has lora_unet_down_blocks_0"),
    ({f"{GOOD}.lora_up.weight": torch.ones(4, 2)}, f"{GOOD} has no down matrix"),
    (PAIR | {f"{GOOD}.lora_up.weight": torch.ones(4, 3)}, "which are no low-rank update"),
    (PAIR | {f"{GOOD}.alpha": torch.ones(2)}, "alpha is not a number"),
    (PAIR | {f"{GOOD}.lora_up.weight": torch.full((4, 2), torch.nan)}, "is not finite in float32"),
    (
        PAIR | {key.replace("lora_unet_", "lora_transformer_"): torch.ones(2, 2) for key in PAIR},
        "has several updates of the same rows",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "says"), BAD)
def test_a_bad_file_is_refused(tmp_path: Path, tensors: dict[str, Tensor], says: str) -> None:
    path = tmp_path / "bad.safetensors"
    save_file(tensors, path)
    with pytest.raises(DataError, match=says):
        read_adapter(path)


def test_values_too_large_for_the_type_are_not_written(tmp_path: Path) -> None:
    adapter = adapter_of(CONFIGS["some"])
    piece = adapter["double_blocks.1.img_attn.proj"].pieces[0]
    piece.up.fill_(1e5)
    with pytest.raises(DataError, match="is not finite in float16"):
        write_adapter(tmp_path / "a.safetensors", adapter, "kohya", torch.float16)
    assert not list(tmp_path.iterdir())
