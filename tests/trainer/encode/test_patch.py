"""The patch autoencoder: shapes, fitting, saving, and refused files."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from fluxtrain.encode.codec import PatchAutoencoder, load_patch_autoencoder, save_patch_autoencoder
from fluxtrain.errors import DataError
from fluxtrain.prepare.fit_autoencoder import (
    FitSettings,
    fit_patch_autoencoder,
    init_from_principal_components,
    standardize_latents,
    to_images,
)

FEW_STEPS = FitSettings(steps=12, decoder_steps=0, batch_size=8)


def discs(count: int = 24, side: int = 64) -> torch.Tensor:
    """Return different images of a coloured disc with a black outline on white."""
    rng = torch.Generator().manual_seed(1)
    axis = torch.arange(side, dtype=torch.float32)
    images = torch.full((count, 3, side, side), 255, dtype=torch.uint8)
    for image in images:
        x, y, radius = (torch.rand(3, generator=rng) * 20 + torch.tensor([22, 22, 8])).tolist()
        distance = ((axis[:, None] - y) ** 2 + (axis - x) ** 2).sqrt()
        colour = torch.randint(0, 256, (3,), generator=rng, dtype=torch.uint8)
        image[:, distance < radius] = colour[:, None]
        image[:, (distance - radius).abs() < 1.5] = 0
    return images


@pytest.fixture(scope="module")
def fitted() -> PatchAutoencoder:
    return fit_patch_autoencoder(discs(), FEW_STEPS)


def psnr(autoencoder: PatchAutoencoder, pixels: torch.Tensor) -> float:
    """Return the peak signal-to-noise ratio of a round trip, in dB."""
    images = to_images(pixels)
    with torch.no_grad():
        back = autoencoder.decode(autoencoder.encode(images)[0]).clamp(-1, 1)
    return float(10 * torch.log10(4 / (back - images).square().mean()))


def test_latents_have_an_eighth_of_the_image_size() -> None:
    images = torch.rand(2, 3, 64, 48) * 2 - 1
    mean, logvar = PatchAutoencoder(channels=16).encode(images)
    assert mean.shape == logvar.shape == (2, 16, 8, 6)
    assert PatchAutoencoder(channels=16).decode(mean).shape == images.shape


def test_initialization_is_the_best_linear_code_of_the_patches() -> None:
    pixels = discs()
    autoencoder = PatchAutoencoder(channels=16)
    init_from_principal_components(autoencoder, pixels)
    patches = torch.nn.functional.unfold(to_images(pixels), 8, stride=8)
    patches = patches.transpose(1, 2).flatten(0, 1)
    centred = patches - patches.mean(0)
    residual = torch.linalg.svdvals(centred)[16:].square().sum() / centred.numel()
    images = to_images(pixels)
    with torch.no_grad():
        error = (autoencoder.decode(autoencoder.encode(images)[0]) - images).square().mean()
    torch.testing.assert_close(error, residual, rtol=1e-3, atol=1e-6)


def test_fitting_is_better_than_the_linear_code() -> None:
    pixels = discs()
    linear = PatchAutoencoder()
    init_from_principal_components(linear, pixels)
    assert (
        psnr(fit_patch_autoencoder(pixels, FitSettings(steps=100, batch_size=8)), pixels)
        > psnr(linear, pixels) + 0.3
    )


def test_latents_have_mean_zero_and_variance_one(fitted: PatchAutoencoder) -> None:
    mean, _ = fitted.encode(to_images(discs()))
    torch.testing.assert_close(mean.mean((0, 2, 3)), torch.zeros(16), rtol=0, atol=1e-4)
    assert mean.std().item() == pytest.approx(1, abs=1e-3)


def test_standardizing_latents_does_not_change_images() -> None:
    pixels = discs()
    autoencoder = PatchAutoencoder()
    init_from_principal_components(autoencoder, pixels)
    before = psnr(autoencoder, pixels)
    standardize_latents(autoencoder, pixels)
    assert psnr(autoencoder, pixels) == pytest.approx(before, abs=1e-3)


def test_fitting_is_deterministic(fitted: PatchAutoencoder) -> None:
    again = fit_patch_autoencoder(discs(), FEW_STEPS).state_dict()
    for name, tensor in fitted.state_dict().items():
        torch.testing.assert_close(tensor, again[name], msg=name)


def test_a_saved_autoencoder_is_loaded(tmp_path: Path, fitted: PatchAutoencoder) -> None:
    path = tmp_path / "models" / "autoencoder.safetensors"
    save_patch_autoencoder(path, fitted)
    latents = torch.randn(2, 16, 8, 8)
    loaded = load_patch_autoencoder(path)
    torch.testing.assert_close(loaded.decode(latents), fitted.decode(latents))
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_error_for_a_missing_file_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="fluxtrain prepare openmoji"):
        load_patch_autoencoder(tmp_path / "none.safetensors")


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 64, b"\x80\x04}q\x00.", save({"weight": torch.zeros(3)})]
)
def test_anything_but_a_patch_autoencoder_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "autoencoder.safetensors"
    path.write_bytes(content)
    with pytest.raises(DataError, match="does not hold a patch autoencoder"):
        load_patch_autoencoder(path)


def test_fitting_the_decoder_alone_keeps_encodings_and_evens_noisy_latents() -> None:
    pixels = discs()
    images = to_images(pixels)
    before = fit_patch_autoencoder(pixels, FEW_STEPS)
    after = fit_patch_autoencoder(pixels, replace(FEW_STEPS, decoder_steps=12))
    latents, same = (each.encode(images)[0] for each in (before, after))
    assert torch.equal(latents, same)
    noise = 0.5 * torch.randn(latents.shape, generator=torch.Generator().manual_seed(2))
    errors = [
        (each.decode(latents + noise) - images).square().mean().item() for each in (before, after)
    ]
    assert errors[1] < errors[0]
