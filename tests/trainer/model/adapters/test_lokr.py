"""LoKr and LoHa: they compute what peft does on diffusers' model with equal weights, as LyCORIS defines."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from benchmarks.reference_model import random_model, reference_of
from peft import LoHaConfig, LoKrConfig, PeftConfig, inject_adapter_in_model
from peft.tuners.lokr.layer import factorization
from tests.trainer.model.adapters.adapted_model import adapted, base_of
from tests.trainer.numerics.predictions import inputs, relative_error, run_reference
from tests.trainer.tiny_model import tiny_model
from torch import nn

from fluxtrain.contract.run.adapter import AdapterConfig, LokrConfig
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.model.flux import Flux
from fluxtrain.model.layers import (
    AdaptedLayer,
    Kronecker,
    adapted_layers,
    count_adapter_parameters,
    divided,
)
from fluxtrain.model.parameters import initial_value

MODEL = tiny_model(depth=1, depth_single_blocks=1)
CASES = {
    "low rank": AdapterConfig(kind="lokr", rank=2, alpha=6.0),
    "both of low rank": AdapterConfig(
        kind="lokr", rank=2, alpha=1.0, lokr=LokrConfig(decompose_both=True)
    ),
    "full": AdapterConfig(kind="lokr", rank=64, alpha=64.0, lokr=LokrConfig(factor=4)),
    "loha": AdapterConfig(kind="loha", rank=3, alpha=6.0),
}


def in_peft(model: Flux, layers: list[AdaptedLayer], adapter: AdapterConfig) -> nn.Module:
    """Return the same model with its layers and adapters in peft's hands; its LoKr is of linear layers."""
    other = random_model(MODEL)
    other.load_state_dict(base_of(model))
    names = [layer.name for layer in layers]
    config: PeftConfig = LoHaConfig(r=adapter.rank, alpha=adapter.alpha, target_modules=names)
    if adapter.kind == "lokr":
        config = LoKrConfig(
            r=adapter.rank,
            alpha=adapter.alpha,
            target_modules=names,
            decompose_both=adapter.lokr.decompose_both,
            decompose_factor=adapter.lokr.factor,
        )
    other = inject_adapter_in_model(config, other.requires_grad_(False), "ours")
    with torch.no_grad():
        for layer in layers:
            for name in layer.shapes:
                theirs = getattr(other.get_submodule(layer.name), name)["ours"]
                theirs.copy_(model.get_parameter(f"{layer.name}.{name}"))
    return other


@pytest.mark.parametrize("case", CASES)
def test_predictions_and_gradients_equal_those_of_peft(case: str) -> None:
    model, layers = adapted(MODEL, CASES[case], deviation=0.3)
    other = in_peft(model, layers, CASES[case])
    batch = inputs(MODEL)
    prediction, expected = model(**batch), other(**batch)
    base = run_reference(reference_of(base_of(model), MODEL), batch)
    assert relative_error(prediction, base) > 0.01
    assert relative_error(prediction, expected) < 1e-5
    target = torch.randn_like(prediction)
    for each in (prediction, expected):
        (each - target).square().mean().backward()
    for layer in layers:
        for name in layer.shapes:
            ours = model.get_parameter(f"{layer.name}.{name}").grad
            theirs = getattr(other.get_submodule(layer.name), name)["ours"].grad
            assert ours is not None
            assert relative_error(ours, theirs) < 1e-5, f"{layer.name}.{name}"


def test_a_width_is_divided_as_peft_and_lycoris_do() -> None:
    widths = (3072, 9216, 12288, 15360, 18432, 21504, *range(1, 300))
    for count, factor in product(widths, (-1, 1, 2, 3, 8, 16, 100)):
        smaller, larger = divided(count, factor)
        assert smaller * larger == count
        if factor**2 <= count:  # above, peft's first number may be the larger one
            assert (smaller, larger) == factorization(count, factor), (count, factor)


def test_factors_are_of_low_rank_where_that_is_smaller() -> None:
    def names(rank: int, **options: bool) -> list[str]:
        return list(Kronecker.of(9216, 3072, rank, LokrConfig(**options)).shapes)

    assert names(16) == ["lokr_w1", "lokr_w2_a", "lokr_w2_b"]
    assert names(16, decompose_both=True) == ["lokr_w1_a", "lokr_w1_b", "lokr_w2_a", "lokr_w2_b"]
    assert names(48) == names(16, full_matrix=True) == ["lokr_w1", "lokr_w2"]


def test_alpha_has_no_effect_on_full_factors() -> None:
    full = Kronecker.of(64, 64, 16, LokrConfig(full_matrix=True))
    low = Kronecker.of(64, 64, 2, LokrConfig())
    assert (full.scale(4.0), low.scale(4.0)) == (1.0, 2.0)


def test_new_adapters_have_no_effect() -> None:
    for case in CASES.values():
        for layer in adapted_layers(MODEL, case):
            values = {
                name: initial_value(f"{layer.name}.{name}", torch.Size(shape), seed=0)
                for name, shape in layer.shapes.items()
            }
            zero = [name for name, value in values.items() if not value.count_nonzero()]
            lokr = "lokr_w2_b" if "lokr_w2_b" in values else "lokr_w2"
            assert zero == ["hada_w2_a" if layer.is_loha else lokr]


def test_the_adapters_of_flux_are_small() -> None:
    adapter = AdapterConfig(kind="lokr", rank=16)
    assert count_adapter_parameters(ModelConfig(), adapter) == sum(
        rows * columns
        for layer in adapted_layers(ModelConfig(), adapter)
        for rows, columns in layer.shapes.values()
    )
    assert count_adapter_parameters(ModelConfig(), adapter) < 4_000_000
