"""Rectified flow, and the packing of latents, compared with diffusers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import FluxPipeline
from diffusers.training_utils import compute_loss_weighting_for_sd3

from fluxtrain.model import loss
from fluxtrain.model.flux import image_ids, pack, text_ids, unpack


def test_interpolation_ends_at_clean_and_at_noise() -> None:
    clean, noise = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    assert torch.equal(loss.interpolate(clean, noise, torch.zeros(2)), clean)
    assert torch.equal(loss.interpolate(clean, noise, torch.ones(2)), noise)


def test_velocity_is_the_derivative_of_the_interpolation() -> None:
    clean, noise = torch.randn(2, 3, 4, 4).double(), torch.randn(2, 3, 4, 4).double()
    at, h = torch.tensor([0.3, 0.6]).double(), 1e-4
    ahead, behind = (loss.interpolate(clean, noise, at + d) for d in (h, -h))
    slope = (ahead - behind) / (2 * h)
    torch.testing.assert_close(slope, loss.velocity(clean, noise), atol=1e-8, rtol=1e-8)


def test_latents_are_sampled_then_shifted_and_scaled() -> None:
    mean, logvar = torch.full((1, 1, 2, 2), 2.0), torch.full((1, 1, 2, 2), 4.0).log()
    noise = torch.full((1, 1, 2, 2), 0.5)
    expected = torch.full((1, 1, 2, 2), (2 + 2 * 0.5 - 0.1159) * 0.3611)
    torch.testing.assert_close(loss.sample_latents(mean, logvar, noise, 0.1159, 0.3611), expected)


def test_losses_are_per_sample_and_float32() -> None:
    prediction, target = torch.randn(3, 2, 4, 4), torch.randn(3, 2, 4, 4)
    losses = loss.sample_losses(prediction.bfloat16(), target)
    assert losses.dtype == torch.float32
    expected = [
        torch.nn.functional.mse_loss(p.bfloat16().float(), t)
        for p, t in zip(prediction, target, strict=True)
    ]
    torch.testing.assert_close(losses, torch.stack(expected))


@pytest.mark.parametrize("weighting", ["none", "sigma_sqrt", "cosmap"])
def test_weights_equal_diffusers(weighting: Any) -> None:
    times = torch.linspace(1e-3, 1, 50)
    expected = compute_loss_weighting_for_sd3(weighting, times)
    torch.testing.assert_close(loss.loss_weights(times, weighting), expected)


def test_weights_of_clean_samples_are_finite() -> None:
    assert loss.loss_weights(torch.zeros(1), "sigma_sqrt").item() == pytest.approx(1e6)


SIZES = [(16, 4, 6), (4, 2, 2), (16, 32, 32), (16, 96, 160)]


@pytest.mark.parametrize(("channels", "height", "width"), SIZES)
def test_unpack_is_the_inverse_of_pack(channels: int, height: int, width: int) -> None:
    latents = torch.randn(3, channels, height, width)
    img = pack(latents)
    assert img.shape == (3, height * width // 4, 4 * channels)
    assert torch.equal(unpack(img, height, width), latents)


def test_tokens_are_ordered_by_row_and_features_by_channel_row_column() -> None:
    channel, row, column = torch.meshgrid(
        torch.arange(3), torch.arange(4), torch.arange(6), indexing="ij"
    )
    (img,) = pack((100 * channel + 10 * row + column)[None].float())
    assert img[0].tolist() == [0, 1, 10, 11, 100, 101, 110, 111, 200, 201, 210, 211]
    assert img[:, 0].tolist() == [0, 2, 4, 20, 22, 24]


@pytest.mark.parametrize(("channels", "height", "width"), SIZES)
def test_packing_equals_diffusers(channels: int, height: int, width: int) -> None:
    latents = torch.randn(2, channels, height, width)
    img = FluxPipeline._pack_latents(latents, 2, channels, height, width)
    assert torch.equal(pack(latents), img)
    theirs = FluxPipeline._unpack_latents(img, 8 * height, 8 * width, vae_scale_factor=8)
    assert torch.equal(unpack(img, height, width), theirs)


@pytest.mark.parametrize(("height", "width"), [(4, 6), (2, 2), (32, 32), (96, 160)])
def test_image_ids_equal_diffusers(height: int, width: int) -> None:
    theirs = FluxPipeline._prepare_latent_image_ids(
        1, height // 2, width // 2, torch.device("cpu"), torch.float32
    )
    ours = image_ids(height, width)
    assert ours.dtype == torch.float32
    assert torch.equal(ours, theirs)


def test_text_ids_are_zero() -> None:
    assert torch.equal(text_ids(5), torch.zeros(5, 3))
