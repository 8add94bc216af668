"""Draws: pure functions of (seed, batch, position), with the documented distributions."""

from typing import get_args

import numpy as np
import pytest
import torch
from diffusers.training_utils import compute_density_for_timestep_sampling
from scipy import stats

from fluxtrain.contract.run.optim import FlowConfig, TimestepSampling
from fluxtrain.runtime import draws

SHAPE = (4, 4, 4)


def timesteps(flow: FlowConfig, count: int = 4000) -> np.ndarray:
    return np.array([draws.training_draw(1, 0, p, SHAPE, flow).timestep for p in range(count)])


def test_equal_keys_give_equal_draws() -> None:
    one, two = (draws.training_draw(7, 3, 5, SHAPE, FlowConfig()) for _ in range(2))
    assert one.timestep == two.timestep
    assert one.dropped == two.dropped
    np.testing.assert_array_equal(one.noise, two.noise)
    np.testing.assert_array_equal(one.latent_noise, two.latent_noise)


@pytest.mark.parametrize("other", [(8, 3, 5), (7, 4, 5), (7, 3, 6)])
def test_another_seed_batch_or_position_gives_another_draw(other: tuple[int, int, int]) -> None:
    one = draws.training_draw(7, 3, 5, SHAPE, FlowConfig())
    two = draws.training_draw(*other, SHAPE, FlowConfig())
    assert abs(np.corrcoef(one.noise.ravel(), two.noise.ravel())[0, 1]) < 0.5
    assert one.timestep != two.timestep


def test_streams_do_not_overlap() -> None:
    first = [draws.generator(7, stream, 3, 5).random() for stream in range(6)]
    assert len(set(first)) == len(first)


def test_noise_is_standard_normal() -> None:
    noise = np.concatenate(
        [draws.training_draw(1, 0, p, SHAPE, FlowConfig()).noise.ravel() for p in range(500)]
    )
    assert stats.kstest(noise, "norm").pvalue > 0.001


@pytest.mark.parametrize(
    ("flow", "cdf"),
    [
        (FlowConfig(), lambda t: t),
        (
            FlowConfig(timestep_sampling="logit_normal", logit_mean=0.5, logit_std=0.8),
            lambda t: stats.norm.cdf((np.log(t / (1 - t)) - 0.5) / 0.8),
        ),
        (
            FlowConfig(timestep_sampling="sigmoid", sigmoid_scale=2.0),
            lambda t: stats.norm.cdf(np.log(t / (1 - t)) / 2),
        ),
        (
            FlowConfig(timestep_sampling="shift", shift=3.0),
            lambda t: stats.norm.cdf(np.log(t / (3 * (1 - t)))),
        ),
        (
            FlowConfig(timestep_sampling="cosmap"),
            lambda t: 2 / np.pi * np.arctan(t / (1 - t)),
        ),
    ],
)
def test_timesteps_have_the_documented_distribution(flow: FlowConfig, cdf) -> None:  # type: ignore[no-untyped-def]
    assert stats.kstest(timesteps(flow), cdf).pvalue > 0.001


@pytest.mark.parametrize("scale", [-0.5, 0.8, 1.29])
def test_mode_has_diffusers_density(scale: float) -> None:
    flow = FlowConfig(timestep_sampling="mode", mode_scale=scale)
    torch.manual_seed(0)
    theirs = compute_density_for_timestep_sampling("mode", 4000, mode_scale=scale)
    assert stats.ks_2samp(timesteps(flow), theirs.numpy()).pvalue > 0.001
    # the same function of the same uniform number, and not its mirror image
    u = draws.generator(1, draws.TRAIN, 0, 0)
    u.random()  # of prompt dropout
    x = u.random()
    expected = 1 - x - scale * (np.cos(np.pi * x / 2) ** 2 - 1 + x)
    assert timesteps(flow, 1)[0] == pytest.approx(expected)


def test_every_sampling_stays_between_clean_and_noise() -> None:
    for sampling in get_args(TimestepSampling):
        values = timesteps(FlowConfig(timestep_sampling=sampling, mode_scale=1.75), 500)
        assert values.min() >= 0, sampling
        assert values.max() <= 1, sampling


def test_a_noise_offset_moves_all_values_of_a_channel_and_no_other_draw() -> None:
    plain = draws.training_draw(1, 0, 3, SHAPE, FlowConfig())
    offset = draws.training_draw(1, 0, 3, SHAPE, FlowConfig(noise_offset=0.5))
    assert (plain.timestep, plain.dropped) == (offset.timestep, offset.dropped)
    np.testing.assert_array_equal(plain.latent_noise, offset.latent_noise)
    moved = (offset.noise - plain.noise).reshape(SHAPE[0], -1)
    assert np.ptp(moved, axis=1).max() < 1e-6
    assert len(np.unique(moved[:, 0])) == SHAPE[0]


def test_noise_offsets_have_the_given_deviation() -> None:
    flow = FlowConfig(noise_offset=0.5)
    means = [draws.training_draw(1, 0, p, SHAPE, flow).noise.mean(axis=(1, 2)) for p in range(1000)]
    # the mean of 16 values of unit variance has a variance of 1/16
    assert stats.kstest(np.ravel(means) / np.sqrt(0.5**2 + 1 / 16), "norm").pvalue > 0.001


def test_flux_shift_grows_with_the_image_size() -> None:
    # BFL's sampling schedule: mu 0.5 at 256 image tokens and 1.15 at 4096.
    assert draws.resolution_mu(256) == pytest.approx(0.5)
    assert draws.resolution_mu(4096) == pytest.approx(1.15)
    flow = FlowConfig(timestep_sampling="flux_shift")
    small = [draws.training_draw(1, 0, p, (1, 32, 32), flow).timestep for p in range(200)]
    large = [draws.training_draw(1, 0, p, (1, 128, 128), flow).timestep for p in range(200)]
    assert np.mean(large) > np.mean(small) > 0.5


def test_prompts_are_dropped_at_the_configured_rate() -> None:
    flow = FlowConfig(prompt_dropout=0.1)
    dropped = [draws.training_draw(3, 0, p, SHAPE, flow).dropped for p in range(5000)]
    assert 0.08 < np.mean(dropped) < 0.12
    assert not any(draws.evaluation_draw(3, i, 0.5, SHAPE).dropped for i in range(100))


def test_an_epoch_contains_every_sample_once() -> None:
    order = draws.epoch_order(5, 2, 1000)
    assert sorted(order) == list(range(1000))
    assert list(order) != list(draws.epoch_order(5, 3, 1000))
