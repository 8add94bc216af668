"""Adapters that a run begins with have the effect of the file, whatever its layout, rank and alpha."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.reference_model import random_model
from tests.trainer.adapter.random_adapters import adapter_of

from fluxtrain.adapter.file import write_adapter
from fluxtrain.adapter.opening import initial_parameters
from fluxtrain.adapter.training_files import trained_adapter
from fluxtrain.adapter.updates import Adapter
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import DataError
from fluxtrain.model.layers import adapted_layers
from fluxtrain.model.lora import magnitudes
from fluxtrain.model.parameters import initial_value
from fluxtrain.parallel.distributed import World
from fluxtrain.parallel.parallelize import build_model

LAYOUTS = ("kohya", "diffusers", "ai-toolkit", "bfl")


def config_of(**adapter: Any) -> RunConfig:
    return resolve({"preset": "micro", "initial_weights": "flux", "adapter": adapter})


def random_adapter(**fields: Any) -> Adapter:
    config = config_of(**fields)
    assert config.adapter is not None
    layers = adapted_layers(config.model, config.adapter)
    torch.manual_seed(0)
    shapes = {f"{layer.name}.{name}": s for layer in layers for name, s in layer.shapes.items()}
    return trained_adapter(layers, {name: torch.randn(shape) for name, shape in shapes.items()})


def saved(folder: Path, layout: Any, **fields: Any) -> Adapter:
    adapter = random_adapter(**fields)
    write_adapter(folder / "style.safetensors", adapter, layout, torch.float32, {})
    return adapter


def begun(folder: Path, **fields: Any) -> tuple[Adapter, dict[str, torch.Tensor]]:
    config = config_of(initial="style.safetensors", **fields)
    assert config.adapter is not None
    parameters = initial_parameters(config, folder)
    given = {name.rpartition(".")[0] for name in parameters}
    layers = adapted_layers(config.model, config.adapter)
    return trained_adapter([each for each in layers if each.name in given], parameters), parameters


def require_equal(ours: Adapter, theirs: Adapter) -> None:
    assert ours.keys() == theirs.keys()
    for name, update in theirs.items():
        torch.testing.assert_close(ours[name].delta(), update.delta(), msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("others", [{}, {"alpha": 2.0}, {"rank": 6}])
def test_the_updates_are_those_of_the_file(
    tmp_path: Path, layout: str, split: bool, others: dict[str, Any]
) -> None:
    expected = saved(tmp_path, layout, rank=4, alpha=8.0, split_qkv=split)
    adapter, _ = begun(tmp_path, **{"rank": 4, "alpha": 8.0, "split_qkv": split, **others})
    require_equal(adapter, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_adapter_of_a_fused_layer_becomes_one_for_each_part(
    tmp_path: Path, layout: str
) -> None:
    expected = saved(tmp_path, layout, rank=4)
    adapter, _ = begun(tmp_path, rank=4, split_qkv=True)
    require_equal(adapter, expected)


def test_split_adapters_of_a_rank_that_fits_become_one(tmp_path: Path) -> None:
    expected = saved(tmp_path, "kohya", rank=4, split_qkv=True)
    adapter, _ = begun(tmp_path, rank=16)
    require_equal(adapter, expected)


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
    tensors |= {f"{name}.base_magnitude": each for name, each in magnitudes(model).items()}
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
