"""What the loss rounds to the compute dtype, against MLPerf's reference written out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.dataset import Batch
from fluxtrain.model import flux
from fluxtrain.model.flux import Flux
from fluxtrain.model.loss import FlowLoss

BF16 = torch.bfloat16


def config_of(rounding: bool) -> RunConfig:
    return resolve(
        {
            "preset": "micro",
            "encoders": {"latent_shift": 0.1159, "latent_scale": 0.3611},
            "flow": {"reference_rounding": rounding},
            "precision": {"compute": "bfloat16"},
        }
    )


def make_batch() -> Batch:
    torch.manual_seed(1)
    timesteps = torch.tensor([0.0, 0.1, 0.3337, 0.999])
    return Batch(
        mean=torch.randn(4, 4, 4, 4).to(BF16),
        logvar=(torch.randn(4, 4, 4, 4) - 3).to(BF16),
        txt=torch.randn(4, 4, 16).to(BF16),
        vec=torch.randn(4, 16).to(BF16),
        latent_noise=torch.randn(4, 4, 4, 4),
        noise=torch.randn(4, 4, 4, 4),
        timesteps=timesteps,
        weights=torch.ones(4),
        keys=torch.zeros(4, dtype=torch.int64),
        dropped=torch.zeros(4, dtype=torch.bool),
        indices=torch.arange(4),
    )


@pytest.fixture
def model() -> Flux:
    torch.manual_seed(0)
    model = Flux(config_of(rounding=True).model).to(BF16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    return model


def reference_loss(model: Flux, batch: Batch) -> Tensor:
    """Follow the order of the reference's train_step: everything up to the loss in bfloat16."""
    mean, logvar = batch.mean, batch.logvar
    latent_noise, noise = batch.latent_noise.to(BF16), batch.noise.to(BF16)
    t = batch.timesteps.to(BF16)
    std = torch.exp(0.5 * logvar)
    clean = ((mean + std * latent_noise) - 0.1159) * 0.3611
    sigmas = t.view(-1, 1, 1, 1)
    noisy = (1 - sigmas) * clean + sigmas * noise
    target = noise - clean
    ids = flux.image_ids(4, 4), flux.text_ids(4)
    packed = model(flux.pack(noisy), ids[0], batch.txt, ids[1], t, batch.vec)
    prediction = flux.unpack(packed, 4, 4)
    assert all(tensor.dtype == BF16 for tensor in (clean, noisy, target, prediction))
    return (prediction.float() - target.float()).square().mean((1, 2, 3))


def test_the_loss_equals_the_references_to_the_last_bit(model: Flux) -> None:
    batch = make_batch()
    with torch.no_grad():
        ours = FlowLoss(model, config_of(rounding=True), BF16)(batch)
        expected = reference_loss(model, batch)
    assert torch.equal(ours, expected)


def test_it_is_float32_without_rounding(model: Flux, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, seen = make_batch(), list[Tensor]()
    pack = flux.pack
    monkeypatch.setattr(flux, "pack", lambda x: pack(seen.append(x) or x))
    with torch.no_grad():
        unrounded = FlowLoss(model, config_of(rounding=False), BF16)(batch)
        (noisy,) = seen
        clean = batch.mean.float() + torch.exp(0.5 * batch.logvar.float()) * batch.latent_noise
        clean = (clean - 0.1159) * 0.3611
        t = batch.timesteps.view(-1, 1, 1, 1)
        torch.testing.assert_close(noisy, (1 - t) * clean + t * batch.noise, rtol=1e-6, atol=1e-6)
        rounded = FlowLoss(model, config_of(rounding=True), BF16)(batch)
    assert noisy.dtype == torch.float32
    assert not torch.equal(unrounded, rounded)


def test_a_timestep_may_round_to_pure_noise(model: Flux) -> None:
    batch = make_batch()
    with torch.no_grad():
        loss = FlowLoss(model, config_of(rounding=True), BF16)
        almost, whole = (
            loss(batch),
            loss(replace(batch, timesteps=torch.tensor([0, 0.1, 0.3337, 1]))),
        )
    assert torch.equal(almost, whole), "the reference's t of 0.999 is 1"


def test_nothing_is_rounded_if_the_compute_dtype_is_float32() -> None:
    batch = make_batch()
    torch.manual_seed(0)
    model = Flux(config_of(rounding=True).model)
    with torch.no_grad():
        both = [FlowLoss(model, config_of(r), torch.float32)(batch) for r in (True, False)]
    assert torch.equal(*both)


@pytest.mark.parametrize("preset", ["mlperf-schnell", "mlperf-schnell-raw"])
def test_the_benchmarks_presets_round(preset: str) -> None:
    assert resolve({"preset": preset}).flow.reference_rounding
    assert not resolve({"preset": "micro"}).flow.reference_rounding
