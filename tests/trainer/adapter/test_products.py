"""Updates as products: low-rank, LoKr, and initial ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.adapters.other_loaders import in_comfy
from benchmarks.reference_model import random_model
from safetensors.torch import load_file, save_file
from tests.trainer.adapter.random_adapters import (
    MODEL,
    adapter_of,
    largest_difference,
    require_same,
    written,
)
from tests.trainer.tiny_model import save_flux
from torch import Tensor

from fluxtrain.adapter.file import LAYOUTS, Layout, describe, read_adapter, write_adapter
from fluxtrain.adapter.merge import MergedWeights
from fluxtrain.adapter.opening import initial_parameters
from fluxtrain.adapter.training_files import trained_adapter
from fluxtrain.adapter.updates import Adapter, Hadamard, Product
from fluxtrain.contract.run.adapter import AdapterConfig, LokrConfig
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import DataError
from fluxtrain.model.layers import HADAMARD_FACTORS, adapted_layers
from fluxtrain.model.lora import magnitudes
from fluxtrain.model.parameters import initial_value
from fluxtrain.parallel.distributed import World
from fluxtrain.parallel.parallelize import build_model
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
    (W1 | W2 | {f"{GOOD}.lokr_t2": torch.ones(2, 2)}, f"{GOOD}.lokr_t2, {GOOD}; no layer is left"),
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


def config_of(**adapter: Any) -> RunConfig:
    return resolve({"preset": "micro", "initial_weights": "flux", "adapter": adapter})


def saved(folder: Path, layout: Layout, **fields: Any) -> Adapter:
    config = config_of(**fields)
    assert config.adapter is not None
    adapter = adapter_of(config.adapter, config.model)
    written(folder, adapter, layout, torch.float32)
    return adapter


def begun(folder: Path, **fields: Any) -> tuple[Adapter, dict[str, torch.Tensor]]:
    config = config_of(initial="style.safetensors", **fields)
    assert config.adapter is not None
    parameters = initial_parameters(config, folder)
    given = {name.rpartition(".")[0] for name in parameters}
    layers = adapted_layers(config.model, config.adapter)
    return trained_adapter([each for each in layers if each.name in given], parameters), parameters


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("others", [{}, {"alpha": 2.0}, {"rank": 6}])
def test_the_updates_are_those_of_the_file(
    tmp_path: Path, layout: Layout, split: bool, others: dict[str, Any]
) -> None:
    expected = saved(tmp_path, layout, rank=4, alpha=8.0, split_qkv=split)
    adapter, _ = begun(tmp_path, **{"rank": 4, "alpha": 8.0, "split_qkv": split, **others})
    require_same(adapter, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_adapter_of_a_fused_layer_becomes_one_for_each_part(
    tmp_path: Path, layout: Layout
) -> None:
    expected = saved(tmp_path, layout, rank=4)
    adapter, _ = begun(tmp_path, rank=4, split_qkv=True)
    require_same(adapter, expected)


def test_split_adapters_of_a_rank_that_fits_become_one(tmp_path: Path) -> None:
    expected = saved(tmp_path, "kohya", rank=4, split_qkv=True)
    adapter, _ = begun(tmp_path, rank=16)
    require_same(adapter, expected)


def test_a_larger_rank_is_filled_up_as_a_new_adapter(tmp_path: Path) -> None:
    saved(tmp_path, "kohya", rank=4)
    _, parameters = begun(tmp_path, rank=6)
    name = "double_blocks.0.img_attn.proj"
    down, up = parameters[f"{name}.lora_A"], parameters[f"{name}.lora_B"]
    seed = config_of(rank=6).drawn_seed
    assert torch.equal(down[4:], initial_value(f"{name}.lora_A", down.shape, seed)[4:])
    assert not up[:, 4:].any()
    assert up[:, :4].all()


def test_layers_that_the_file_does_not_have_begin_anew(tmp_path: Path) -> None:
    saved(tmp_path, "kohya", rank=4, single_blocks="none")
    _, parameters = begun(tmp_path, rank=4)
    assert parameters
    assert not any(name.startswith("single_blocks") for name in parameters)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 2}, "has rank 4, more than the 2 of spec.run.adapter; fluxtrain adapter resize"),
        ({"single_blocks": "none"}, "it adapts single_blocks.0.linear1 and 2 more, to which"),
        ({"ranks": {"img_mod": 0}}, "it adapts double_blocks.0.img_mod.lin, to which"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    saved(tmp_path, "kohya", rank=4)
    with pytest.raises(DataError, match=message):
        begun(tmp_path, **{"rank": 4, **fields})


def test_a_file_of_parts_needs_split_layers_for_its_rank(tmp_path: Path) -> None:
    """Resized, it would lose two thirds of the ranks."""
    saved(tmp_path, "diffusers", rank=4, split_qkv=True)
    text = (
        "has rank 12, more than the 4 of spec.run.adapter; adapter.split_qkv: true keeps its parts"
    )
    with pytest.raises(DataError, match=text):
        begun(tmp_path, rank=4)
    assert begun(tmp_path, rank=4, split_qkv=True)[1]


def test_the_file_of_another_model_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, "kohya", rank=4)
    config = config_of(rank=4, initial="style.safetensors")
    wider = config.model.model_copy(update={"hidden_size": 64, "axes_dim": (8, 12, 12)})
    with pytest.raises(DataError, match=r"proj has shape \(32, 32\), should have"):
        initial_parameters(config.model_copy(update={"model": wider}), tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"style.safetensors"):
        begun(tmp_path, rank=4)


def test_magnitudes_begin_as_they_were_and_need_a_dora(tmp_path: Path) -> None:
    settings = {"rank": 4, "alpha": 8.0, "dora": True, "initial": "dora.safetensors"}
    run = {"preset": "micro", "initial_weights": "weights.safetensors", "adapter": settings}
    config = resolve(run)
    assert config.adapter is not None
    given = adapter_of(config.adapter, config.model)
    path = tmp_path / "dora.safetensors"
    write_adapter(path, given, "diffusers", torch.float32)
    weights = random_model(config.model).state_dict()
    parameters = initial_parameters(config, tmp_path)
    model = build_model(config, World.alone(), weights.items(), adapters=parameters)
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    tensors |= magnitudes(model)
    ours = trained_adapter(adapted_layers(config.model, config.adapter), tensors)
    for name, update in given.items():
        weight = weights[f"{name}.weight"]
        torch.testing.assert_close(ours[name].change(weight), update.change(weight), msg=name)
    plain = resolve({**run, "adapter": {**settings, "dora": False}})
    with pytest.raises(DataError, match=r"has none, as adapter\.dora is false"):
        initial_parameters(plain, tmp_path)
    write_adapter(
        path, adapter_of(plain.adapter or config.adapter, plain.model), "kohya", torch.float32
    )
    with pytest.raises(DataError, match=r"magnitudes \(DoRA\) of 0 of its"):
        initial_parameters(config, tmp_path)
