"""Dropout of adapters: what kohya drops, the same for any division of the samples, nothing in evaluations."""

from __future__ import annotations

import pytest
import torch
from benchmarks.reference_model import random_model
from tests.trainer.numerics.predictions import inputs, relative_error
from tests.trainer.tiny_model import tiny_model
from torch import Tensor

from fluxtrain.contract.run.adapter import AdapterConfig
from fluxtrain.model.flux import Flux
from fluxtrain.model.layers import adapted_layers
from fluxtrain.model.lora import AdapterDropout, adapter_keys, add_adapters, is_adapter, set_keys
from fluxtrain.parallel.parallelize import recompute_activations

MODEL = tiny_model(depth=1, depth_single_blocks=1)
ADAPTER = AdapterConfig(rank=4, dropout=0.2, rank_dropout=0.25, module_dropout=0.3)
SAMPLES, TOKENS, RANK = 64, 256, 32


@pytest.fixture(scope="module")
def keys() -> Tensor:
    return torch.randint(2**32, (SAMPLES,), generator=torch.Generator().manual_seed(3))


def applied(keys: Tensor, name: str = "a", **probabilities: float) -> Tensor:
    """Return what is left of ones."""
    dropout = AdapterDropout(**{"values": 0, "ranks": 0, "adapter": 0} | probabilities)
    return dropout.apply(torch.ones(len(keys), TOKENS, RANK), *adapter_keys(keys, [name]))


def test_values_are_dropped_one_by_one_and_the_others_scaled_up(keys: Tensor) -> None:
    left = applied(keys, values=0.2)
    assert set(left.unique().tolist()) == {0.0, 1.25}
    for dims in ((1, 2), (0, 2), (0, 1)):
        shares = (left == 0).float().mean(dims)
        deviation = (0.2 * 0.8 / (left.numel() / len(shares))) ** 0.5
        assert (shares - 0.2).abs().max() < 5 * deviation
    neighbours = ((left[:, 1:] == 0) & (left[:, :-1] == 0)).float().mean()
    assert neighbours.item() == pytest.approx(0.04, rel=0.03), "independent"


def test_a_rank_is_dropped_for_all_tokens_of_a_sample(keys: Tensor) -> None:
    left = applied(keys, ranks=0.25)
    assert torch.equal(left, left[:, :1].expand_as(left))
    assert left.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert (left == 0).float().mean().item() == pytest.approx(0.25, abs=0.04)
    assert (left[:, 0] == 0).float().std(0).min() > 0, "each sample has its own"


def test_an_adapter_is_dropped_whole_for_a_sample_and_not_scaled(keys: Tensor) -> None:
    left = applied(keys, adapter=0.5)
    assert torch.equal(left, left[:, :1, :1].expand_as(left))
    assert set(left.unique().tolist()) == {0.0, 1.0}
    other = applied(keys, "b", adapter=0.5)
    assert 0.3 < (left == other).float().mean() < 0.7, "each layer has its own"


def test_the_three_kinds_multiply(keys: Tensor) -> None:
    both = applied(keys, values=0.2, ranks=0.25, adapter=0.3)
    parts = applied(keys, values=0.2), applied(keys, ranks=0.25), applied(keys, adapter=0.3)
    assert torch.allclose(both, parts[0] * parts[1] * parts[2])


def test_a_sample_of_a_modulation_has_no_tokens(keys: Tensor) -> None:
    dropout = AdapterDropout(values=0.2, ranks=0.25, adapter=0.3)
    left = dropout.apply(torch.ones(SAMPLES, RANK), keys)
    assert (left == 0).float().mean().item() == pytest.approx(1 - 0.8 * 0.75 * 0.7, abs=0.06)


def adapted(seed: int = 0) -> Flux:
    torch.manual_seed(seed)
    model = random_model(MODEL)
    layers = adapted_layers(MODEL, ADAPTER)
    add_adapters(model, layers, torch.float32, AdapterDropout.of(ADAPTER))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.normal_(0, 0.1)
    return model


def gradients(model: Flux, batches: list[tuple[dict[str, Tensor], Tensor]]) -> dict[str, Tensor]:
    for batch, keys in batches:
        set_keys(model, keys)
        model(**batch).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def part(batch: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    """Return sample ``index`` of ``batch``; ids have no samples."""
    return {k: v if k.endswith("ids") else v[index : index + 1] for k, v in batch.items()}


def test_gradients_depend_neither_on_the_micro_batches_nor_on_recomputation() -> None:
    model, batch = adapted(), inputs(MODEL)
    keys = torch.arange(1, len(batch["img"]) + 1)
    whole = gradients(model, [(batch, keys)])
    other = adapted()
    other.load_state_dict(model.state_dict())
    recompute_activations(other, 1.0)
    each = [(part(batch, i), keys[i : i + 1]) for i in range(len(keys))]
    divided = gradients(other, each)
    assert whole.keys() == divided.keys()
    for name, value in whole.items():
        assert relative_error(divided[name], value) < 1e-5, name
    model.zero_grad()
    changed = gradients(model, [(batch, keys + 7)])
    assert not any(torch.allclose(changed[name], value) for name, value in whole.items())


def test_nothing_is_dropped_in_an_evaluation() -> None:
    model, batch = adapted(), inputs(MODEL)
    plain = adapted()
    plain.load_state_dict(model.state_dict())
    for module in plain.modules():
        module.dropout = None
    set_keys(model, torch.arange(len(batch["img"])))
    with torch.no_grad():
        expected, dropped = plain(**batch), model(**batch)
        assert not torch.allclose(dropped, expected, rtol=1e-2)
        assert torch.equal(model.eval()(**batch), expected)
