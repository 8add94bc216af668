"""Files of products (LoKr, LoHa): LyCORIS' names, which ComfyUI reads, and what is done with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.adapters.other_loaders import in_comfy
from benchmarks.reference_model import random_model
from safetensors.torch import load_file, save_file
from tests.trainer.adapter.random_adapters import MODEL, adapter_of, largest_difference, written
from tests.trainer.tiny_model import save_flux
from torch import Tensor

from fluxtrain.adapter.file import Layout, describe, read_adapter
from fluxtrain.adapter.merge import MergedWeights
from fluxtrain.adapter.opening import initial_parameters
from fluxtrain.adapter.updates import Hadamard, Product
from fluxtrain.contract.run.adapter import AdapterConfig, LokrConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import DataError
from fluxtrain.model.layers import HADAMARD_FACTORS
from fluxtrain.weights.reader import open_weights

CONFIGS = {
    "low rank": AdapterConfig(kind="lokr", rank=2, alpha=6.0),
    "both": AdapterConfig(kind="lokr", rank=2, alpha=1.0, lokr=LokrConfig(decompose_both=True)),
    "full": AdapterConfig(kind="lokr", rank=2, alpha=6.0, lokr=LokrConfig(full_matrix=True)),
    "loha": AdapterConfig(kind="loha", rank=2, alpha=6.0),
}
NAMES = {
    "kohya": "lora_unet_single_blocks_2_linear1",
    "bfl": "diffusion_model.single_blocks.2.linear1",
}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("layout", NAMES)
def test_a_file_is_read_back_with_its_names(tmp_path: Path, layout: Layout, kind: str) -> None:
    adapter = adapter_of(CONFIGS[kind])
    path = written(tmp_path, adapter, layout, torch.float32)
    found = read_adapter(path)
    assert found.adapter.keys() == adapter.keys()
    for layer, update in adapter.items():
        other = found.adapter[layer]
        assert (other.outputs, other.inputs) == (update.outputs, update.inputs)
        assert largest_difference(update.delta(), other.delta()) < 1e-6, layer
        assert other.norm() == pytest.approx(update.delta().norm().item(), rel=1e-5)
    names = {name.removeprefix(f"{NAMES[layout]}.") for name in load_file(path)}
    factors = {"low rank": {"lokr_w1", "lokr_w2_a", "lokr_w2_b"}, "full": {"lokr_w1", "lokr_w2"}}
    factors["loha"] = set(HADAMARD_FACTORS)
    assert factors.get(kind, {"lokr_w1_a", "lokr_w1_b", "lokr_w2_a", "lokr_w2_b"}) < names
    described = dict(describe(found))
    if kind == "loha":
        assert described["holds"] == "Hadamard products (LoHa)"
    else:
        assert described["products"].startswith("29 layers")


@pytest.mark.parametrize("kind", CONFIGS)
def test_comfyui_computes_our_update(tmp_path: Path, kind: str) -> None:
    adapter = adapter_of(CONFIGS[kind])
    path = written(tmp_path, adapter, "kohya", torch.float32)
    shapes = {layer: (update.outputs, update.inputs) for layer, update in adapter.items()}
    for layer, theirs in in_comfy(path, MODEL, shapes).items():
        assert largest_difference(adapter[layer].delta(), theirs) < 1e-6, layer


@pytest.mark.parametrize("layout", ["diffusers", "ai-toolkit"])
def test_layouts_of_parts_have_no_place_for_it(tmp_path: Path, layout: Layout) -> None:
    with pytest.raises(
        DataError, match=r"has no place for .*, Kronecker products \(LoKr\): kohya, bfl have"
    ):
        written(tmp_path, adapter_of(CONFIGS["full"]), layout, torch.float32)


@pytest.mark.parametrize("rank", [3, 1000])
def test_the_closest_lora_is_that_of_the_singular_values(rank: int) -> None:
    for layer, update in adapter_of(CONFIGS["low rank"]).items():
        values = torch.linalg.svdvals(update.delta())
        rest = (update.delta() - update.resized(rank).delta()).norm()
        assert rest.item() == pytest.approx(values[rank:].norm().item(), rel=1e-3, abs=1e-4), layer


def test_it_is_merged_into_weights(tmp_path: Path) -> None:
    model = random_model(MODEL)
    save_flux(model, tmp_path)
    file = read_adapter(written(tmp_path, adapter_of(CONFIGS["both"]), "kohya", torch.float32))
    merged = MergedWeights(open_weights(tmp_path / "weights.safetensors"), [(file, 0.5)])
    name = "double_blocks.1.img_attn.qkv"
    ((_, found),) = merged.read([f"{name}.weight"])
    before = model.get_parameter(f"{name}.weight")
    assert torch.allclose(found, before + 0.5 * file.adapter[name].delta(), atol=1e-6)


@pytest.mark.parametrize(("config", "first"), [("low rank", "lokr_w1"), ("loha", "hada_w1_a")])
def test_a_run_begins_with_a_product_of_the_same_factors_only(
    tmp_path: Path, config: str, first: str
) -> None:
    adapter, kind = adapter_of(CONFIGS[config]), CONFIGS[config].kind
    path = written(tmp_path, adapter, "kohya", torch.float32)
    begin = {"kind": kind, "rank": 2, "alpha": 3.0, "initial": path.name}
    run = {"preset": "micro", "initial_weights": "w", "model": MODEL.model_dump()}
    parameters = initial_parameters(resolve(run | {"adapter": begin}), tmp_path)
    for layer, update in adapter.items():
        own = {n.rpartition(".")[2]: t for n, t in parameters.items() if n.startswith(f"{layer}.")}
        made = Hadamard(own, 3.0 / 2) if kind == "loha" else Product(own, 3.0 / 2)
        assert largest_difference(made.delta(), update.delta()) < 1e-5
    for other, has in (
        (begin | {"rank": 3}, f"has {{'{first}': "),
        (begin | {"kind": "lora"}, "a low-rank"),
    ):
        with pytest.raises(DataError, match=has):
            initial_parameters(resolve(run | {"adapter": other}), tmp_path)


GOOD = "lora_unet_single_blocks_0_linear2"
W1, W2 = {f"{GOOD}.lokr_w1": torch.ones(2, 2)}, {f"{GOOD}.lokr_w2": torch.ones(2, 4)}
PART = "transformer.single_transformer_blocks.0.attn.to_q"
BAD: list[tuple[dict[str, Tensor], str]] = [
    (W1, f"{GOOD} has no lokr_w2, or two"),
    (W1 | W2 | {f"{GOOD}.lokr_w1_a": torch.ones(2, 2)}, f"{GOOD} has no lokr_w1, or two"),
    (W1 | {f"{GOOD}.lokr_w2_a": torch.ones(2, 2), f"{GOOD}.lokr_w2_b": torch.ones(3, 2)},
     r"\[2, 2\] and \[3, 2\], which have no product"),
    (W1 | {f"{GOOD}.lokr_w2": torch.ones(2)}, "has a factor that is no matrix"),
    (W1 | W2 | {f"{GOOD}.lokr_t2": torch.ones(2, 2)}, f"{GOOD}.lokr_t2; --skip-unknown"),
    ({name.replace(GOOD, PART): t for name, t in (W1 | W2).items()},
     r"part 0 of single_blocks.0.linear1 has a matrix of shape \[4, 8\]"),
    (W1 | W2 | {f"{GOOD.replace('lora_unet', 'lora_transformer')}.lora_down.weight": torch.ones(2, 8),
                f"{GOOD.replace('lora_unet', 'lora_transformer')}.lora_up.weight": torch.ones(4, 2)},
     "has several updates of the same rows"),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "says"), BAD)
def test_a_bad_file_is_refused(tmp_path: Path, tensors: dict[str, Tensor], says: str) -> None:
    save_file(tensors, tmp_path / "bad.safetensors")
    with pytest.raises(DataError, match=says):
        read_adapter(tmp_path / "bad.safetensors")
