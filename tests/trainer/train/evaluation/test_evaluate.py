"""The evaluation loss against a plain implementation of MLPerf's pseudo-code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.dataset import Batch
from fluxtrain.data.loader import evaluation_batches
from fluxtrain.data.sources import open_source
from fluxtrain.model import flux
from fluxtrain.model.blocks import Rotation
from fluxtrain.model.flux import Flux
from fluxtrain.model.loss import FlowLoss
from fluxtrain.parallel.distributed import World
from fluxtrain.train.evaluate import evaluate

WORLD = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"))


def make_config(**evaluation: object) -> RunConfig:
    data = {"synthetic": {"validation_samples": 21}}
    return resolve({"preset": "micro", "data": data, "evaluation": evaluation})


def make_loss(config: RunConfig) -> FlowLoss:
    torch.manual_seed(0)
    model = Flux(config.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    return FlowLoss(model, config, torch.float32)


def batches(config: RunConfig) -> list[Batch]:
    return list(evaluation_batches(config, open_source(config, Path(), "validation"), 0, 1))


def test_the_loss_equals_a_plain_loop_over_samples() -> None:
    config = make_config(batch_size=8)
    loss = make_loss(config)
    by_level = dict[int, list[float]]()
    for batch in batches(config):
        for i in range(len(batch)):
            if not batch.weights[i]:
                continue
            clean = (
                batch.mean[i : i + 1]
                + torch.exp(0.5 * batch.logvar[i : i + 1]) * batch.latent_noise[i]
            )
            t, noise = batch.timesteps[i], batch.noise[i : i + 1]
            noisy = (1 - t) * clean + t * noise
            side = config.data.latent_size
            with torch.no_grad():
                predicted = loss.model(
                    flux.pack(noisy),
                    flux.image_ids(side, side),
                    batch.txt[i : i + 1],
                    flux.text_ids(batch.txt.shape[1]),
                    t[None],
                    batch.vec[i : i + 1],
                )
            error = (flux.unpack(predicted, side, side) - (noise - clean)).square().mean().item()
            by_level.setdefault(int(t * 8), []).append(error)
    result = evaluate(loss, batches(config), WORLD)
    assert result.num_samples == sum(map(len, by_level.values())) == 21
    expected = [np.mean(by_level[level]) for level in range(8)]
    assert result.by_timestep == pytest.approx(expected, rel=1e-5)
    assert result.loss == pytest.approx(np.mean(expected), rel=1e-5)


@pytest.mark.parametrize(("samples", "timesteps"), [(1, 1), (3, 3), (8, 8), (9, 8), (16, 8)])
def test_the_loss_is_the_mean_of_the_timesteps_that_the_set_has(
    samples: int, timesteps: int
) -> None:
    config = make_config()
    data = config.data.model_copy(
        update={
            "synthetic": config.data.synthetic.model_copy(update={"validation_samples": samples})
        }
    )
    config = config.model_copy(update={"data": data})
    loss = make_loss(config)
    result = evaluate(loss, batches(config), WORLD)
    with torch.no_grad():
        losses = torch.cat([loss(batch)[batch.weights > 0] for batch in batches(config)])
    assert result.num_samples == len(losses) == samples
    means = [mean for mean in result.by_timestep if mean is not None]
    assert len(means) == timesteps
    assert result.loss == pytest.approx(np.mean(means), rel=1e-12)
    if samples % 8 == 0:  # balanced: MLPerf's mean over the samples
        assert result.loss == pytest.approx(losses.double().mean().item(), rel=1e-6)


@pytest.mark.parametrize("batch_size", [1, 4, 21, 64])
def test_the_batch_size_does_not_change_the_loss(batch_size: int) -> None:
    config = make_config(batch_size=batch_size)
    reference = evaluate(make_loss(config), batches(make_config(batch_size=16)), WORLD)
    assert evaluate(make_loss(config), batches(config), WORLD).loss == pytest.approx(
        reference.loss, rel=1e-5
    )


def test_ranks_have_equal_numbers_of_batches_and_each_sample_once() -> None:
    config = make_config(batch_size=4)
    source = open_source(config, Path(), "validation")
    per_rank = [list(evaluation_batches(config, source, rank, 3)) for rank in range(3)]
    assert len({len(part) for part in per_rank}) == 1
    indices = [int(i) for part in per_rank for batch in part for i in batch.indices if i >= 0]
    assert sorted(indices) == list(range(21))


def test_padding_has_weight_zero() -> None:
    config = make_config(batch_size=16)
    *_, last = batches(config)
    assert last.weights.sum() == 5
    assert (last.indices < 0).sum() == len(last) - 5


def test_evaluations_of_equal_weights_are_bit_equal() -> None:
    config = make_config()
    loss = make_loss(config)
    assert evaluate(loss, batches(config), WORLD) == evaluate(loss, batches(config), WORLD)


def test_batches_of_one_shape_share_their_ids_and_one_rotation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loss, counted = make_loss(make_config(batch_size=8)), list[int]()
    computed = flux.rotation

    def rotation(ids: Tensor, *args: Any) -> Rotation:
        counted.append(len(ids))
        return computed(ids, *args)

    monkeypatch.setattr(flux, "rotation", rotation)
    first = batches(loss.config)[0]
    shorter = replace(first, txt=first.txt[:, :-1])
    with torch.no_grad():
        losses = [loss(batch) for batch in (first, first, shorter, first)]
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(losses[0], losses[3]), "after a batch of another shape"
    tokens = counted[0]
    assert counted == [tokens, tokens - 1, tokens]
