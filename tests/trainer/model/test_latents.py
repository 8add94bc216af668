"""Packing and unpacking of latents, compared with diffusers."""

import pytest
import torch
from diffusers import FluxPipeline

from fluxtrain.model.flux import image_ids, pack, text_ids, unpack

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
