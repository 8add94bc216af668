"""Frozen weights in 8 bits: close to the given ones, and a model that computes with just those."""

from __future__ import annotations

import pytest
import torch
from benchmarks.reference_model import random_model
from tests.trainer.numerics.predictions import inputs, relative_error
from torch import Tensor

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.model.flux import Flux
from fluxtrain.model.fp8 import STORAGE, UNIT, base_weight, quantized
from fluxtrain.model.layers import linear_layers
from fluxtrain.model.lora import is_adapter
from fluxtrain.parallel.distributed import World
from fluxtrain.parallel.parallelize import build_model

ADAPTERS = {
    "lora": {"rank": 4, "split_qkv": True},
    "dora of some blocks": {"rank": 4, "dora": True, "double_blocks": "none"},
    "lokr": {"kind": "lokr", "rank": 2},
    "loha": {"kind": "loha", "rank": 2},
}


def config_of(compute: str = "float32", **adapter: object) -> RunConfig:
    return resolve(
        {
            "preset": "micro",
            "initial_weights": "weights.safetensors",
            "precision": {"compute": compute},
            "adapter": adapter,
        }
    )


def built(config: RunConfig, weights: dict[str, Tensor]) -> Flux:
    """Return the model with random adapters that have an effect."""
    model = build_model(config, World.alone(), weights.items())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def test_each_row_is_rounded_by_a_sixteenth_at_most_and_exact_in_bfloat16() -> None:
    weight = torch.randn(64, 96) * torch.logspace(-6, 4, 64)[:, None]
    weight[3] = 0.0
    values, unit = quantized(weight)
    assert values.dtype == STORAGE
    assert torch.equal(unit.log2(), unit.log2().round())
    result = values.float() * unit[:, None]
    largest = weight.abs().amax(dim=1, keepdim=True)
    assert ((result - weight).abs() <= weight.abs() / 16 + largest / 448 / 1024 * 2).all()
    assert torch.equal(result.bfloat16().float(), result)
    assert not result[3].count_nonzero()
    again, same = quantized(result)
    assert torch.equal(again.float() * same[:, None], result)


@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS.keys())
def test_predictions_and_gradients_are_those_of_the_rounded_weights(
    adapter: dict[str, object],
) -> None:
    config = config_of(base_dtype="fp8", **adapter)
    weights = random_model(config.model).state_dict()
    small = built(config, weights)
    names = linear_layers(config.model)
    linears = {name: small.get_submodule(name) for name in names}
    assert all(module.weight.dtype == STORAGE for module in linears.values())
    others = [p for n, p in small.named_parameters() if n.removesuffix(".weight") not in names]
    assert {each.dtype for each in others} == {torch.float32}
    assert not [name for name in small.state_dict() if name.endswith(UNIT)]
    rounded = weights | {
        f"{name}.weight": base_weight(module, torch.float32)  # type: ignore[arg-type]
        for name, module in linears.items()
    }
    large = built(config_of(**adapter), rounded)
    batch = inputs(config.model)
    predictions = small(**batch), large(**batch)
    assert relative_error(*predictions) < 1e-5
    target = torch.randn_like(predictions[0])
    for each in predictions:
        (each - target).square().mean().backward()
    trained = {n: p.grad for n, p in large.named_parameters() if p.requires_grad}
    assert trained
    for name, gradient in trained.items():
        assert relative_error(small.get_parameter(name).grad, gradient) < 1e-5, name
    given = built(config_of(**adapter), weights)(**batch)
    assert 1e-4 < relative_error(predictions[0], given) < 0.1


def test_nothing_of_a_frozen_weight_is_kept_in_the_compute_dtype() -> None:
    config = config_of("bfloat16", rank=4, base_dtype="fp8")
    model = build_model(config, World.alone(), random_model(config.model).state_dict().items())
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.bfloat16()
    kept = list[torch.Size]()

    def record(tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.bfloat16:
            kept.append(tensor.shape)
        return tensor

    batch = {
        k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs(config.model).items()
    }
    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        model(**batch)
    frozen = {model.get_submodule(name).weight.shape for name in linear_layers(config.model)}
    assert kept
    assert not frozen & set(kept)
