"""LoRA and DoRA adapters: what they compute is peft's on diffusers' model with the same weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from benchmarks.adapters.peft_adapters import add_peft_adapters, by_peft_names
from benchmarks.reference_model import random_model, reference_of
from diffusers import FluxTransformer2DModel
from tests.trainer.model.adapters.adapted_model import adapted, base_of
from tests.trainer.numerics.predictions import inputs, relative_error, run_reference
from tests.trainer.tiny_model import tiny_model
from torch.optim import AdamW

from fluxtrain.contract.run.adapter import AdapterConfig, AdapterRanks, selected_blocks
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.model.flux import Flux
from fluxtrain.model.layers import AdaptedLayer, adapted_layers, count_adapter_parameters
from fluxtrain.model.lora import DoraLinear, add_adapters, is_adapter, measure
from fluxtrain.model.parameters import count_parameters, described_parameters, initial_value

pytestmark = pytest.mark.slow

MODEL = tiny_model(depth=2, depth_single_blocks=2, guidance_embed=True)
SPLIT = AdapterConfig(rank=4, alpha=6.0, split_qkv=True)
MIXED = AdapterConfig(
    rank=4,
    alpha=6.0,
    split_qkv=True,
    ranks=AdapterRanks(img_attn=8, txt_mlp=2, img_mod=0, single=3),
    double_blocks="1",
)
DORA = SPLIT.model_copy(update={"dora": True})
MIXED_DORA = MIXED.model_copy(update={"dora": True})
STEPS = 50


def in_peft(model: Flux, layers: list[AdaptedLayer], config: ModelConfig) -> FluxTransformer2DModel:
    """Return diffusers' model with the weights of ``model`` and peft's adapters with those of ours."""
    other = reference_of(base_of(model), config)
    add_peft_adapters(other, model, layers)
    return other


@pytest.mark.parametrize(
    "adapter",
    [SPLIT, MIXED, DORA, MIXED_DORA],
    ids=["all layers", "some layers and ranks", "magnitudes", "magnitudes of some layers"],
)
def test_predictions_and_gradients_equal_those_of_peft(adapter: AdapterConfig) -> None:
    model, layers = adapted(MODEL, adapter)
    other = in_peft(model, layers, MODEL)
    batch = inputs(MODEL)
    prediction, expected = model(**batch), run_reference(other, batch)
    assert relative_error(prediction, expected) < 1e-5
    target = torch.randn_like(prediction)
    (prediction - target).square().mean().backward()
    (expected - target).square().mean().backward()
    theirs = {name: p.grad for name, p in other.named_parameters() if p.requires_grad}
    ours = by_peft_names(model, layers, "grad")
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert relative_error(gradient, theirs[name]) < 1e-5, name
    assert all(p.grad is None for name, p in model.named_parameters() if not is_adapter(name))


@pytest.mark.parametrize("dora", [False, True])
def test_a_fused_adapter_is_one_that_its_parts_share(dora: bool) -> None:
    fused, layers = adapted(MODEL, AdapterConfig(rank=4, alpha=6.0, dora=dora))
    split, _ = adapted(MODEL, DORA if dora else SPLIT)
    split.load_state_dict(base_of(fused), strict=False)
    for layer in layers:
        source, target = (each.get_submodule(layer.name) for each in (fused, split))
        times = len(target.lora_A) // len(source.lora_A)
        target.lora_A.data = source.lora_A.data.repeat(times, 1)
        target.lora_B.data = source.lora_B.data
        if dora:
            target.magnitude, target.base_magnitude = source.magnitude, source.base_magnitude
    batch = inputs(MODEL)
    assert relative_error(fused(**batch), split(**batch)) < 1e-5


@pytest.mark.parametrize(("adapter", "decay"), [(SPLIT, 0.01), (DORA, 0.0)])
def test_the_loss_of_fifty_steps_is_that_of_peft(adapter: AdapterConfig, decay: float) -> None:
    model, layers = adapted(MODEL, adapter)
    other = in_peft(model, layers, MODEL)
    curves = []
    for trained, run in ((model, lambda b: model(**b)), (other, lambda b: run_reference(other, b))):
        parameters = [p for p in trained.parameters() if p.requires_grad]
        optimizer, losses = AdamW(parameters, lr=1e-3, weight_decay=decay), []
        for step in range(STEPS):
            batch = inputs(MODEL)
            torch.manual_seed(step)
            batch["img"] = torch.randn_like(batch["img"])
            loss = (run(batch) - batch["img"]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        curves.append(losses)
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)
    assert sum(curves[0][-5:]) < 0.9 * sum(curves[0][:5])


@pytest.mark.parametrize(
    ("split", "layers", "parameters"), [(False, 304, 4_786_176), (True, 304, 5_369_856)]
)
def test_the_adapters_of_flux_have_the_parameters_of_kohyas(
    split: bool, layers: int, parameters: int
) -> None:
    adapter, model = AdapterConfig(rank=1, split_qkv=split), ModelConfig(guidance_embed=True)
    assert len(adapted_layers(model, adapter)) == layers
    assert count_adapter_parameters(model, adapter) == parameters


@pytest.mark.parametrize(
    ("text", "expected"),
    [("all", {0, 1, 2, 3, 4}), ("none", set()), ("0,2-3", {0, 2, 3}), ("4", {4})],
)
def test_blocks_are_selected_by_number(text: str, expected: set[int]) -> None:
    assert selected_blocks(text, 5) == expected


def test_new_adapters_have_no_effect() -> None:
    layer = replace(adapted_layers(MODEL, SPLIT)[0], is_split=False)
    down, up = (
        initial_value(f"{layer.name}.{kind}", torch.Size(shape), seed=0)
        for kind, shape in layer.shapes.items()
    )
    assert torch.count_nonzero(up) == 0
    bound = layer.inputs**-0.5
    assert 0.9 * bound < down.abs().max() <= bound


def test_new_magnitudes_have_no_effect_in_bfloat16_either() -> None:
    layer = adapted_layers(MODEL, DORA)[0]
    model = random_model(MODEL)
    plain = model.get_submodule(layer.name)
    weight, bias = plain.weight.detach().bfloat16(), plain.bias.detach().bfloat16()
    add_adapters(model, [layer], torch.bfloat16)
    measure(model, f"{layer.name}.weight", plain.weight)
    module = model.get_submodule(layer.name)
    assert isinstance(module, DoraLinear)
    with torch.no_grad():
        for name, shape in layer.shapes.items():
            value = initial_value(f"{layer.name}.{name}", torch.Size(shape), seed=0)
            getattr(module, name).data = value.bfloat16()
    x = torch.randn(4, layer.inputs, dtype=torch.bfloat16)
    before = torch.nn.functional.linear(x, weight) + bias
    assert torch.equal(module(x), before)


def test_trained_parameters_are_told_from_those_of_the_model() -> None:
    model, _ = adapted(MODEL, SPLIT)
    trained, total = count_adapter_parameters(MODEL, SPLIT), count_parameters(MODEL).total
    assert described_parameters(random_model(MODEL)) == f"{total:,} parameters"
    assert described_parameters(model) == f"{trained:,} of {total + trained:,} parameters"
