"""Euler sampling is exact on straight lines, guidance extrapolates, and the grid shows every image."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.precision import SamplingConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.sample.denoise import denoise, initial_noise, to_pil_images
from fluxtrain.sample.grid import save_grid

SHAPE = (4, 2, 2)


@dataclass
class StraightLineModel:
    """Predicts the velocity from ``noisy`` to ``clean``, plus ``vec``."""

    clean: Tensor
    config: RunConfig

    def predict(
        self, noisy: Tensor, txt: Tensor, vec: Tensor, t: Tensor, guidance: float, condition: None
    ) -> Tensor:
        velocity: Tensor = (noisy - self.clean) / t.view(-1, 1, 1, 1)
        return velocity + vec[:, :1, None, None]


def sample(steps: int, cfg_scale: float, offset: float = 0.0, **encoders: float) -> Tensor:
    config = resolve({"preset": "micro", "encoders": encoders})
    model: Any = StraightLineModel(torch.full(SHAPE, 0.25), config)
    noise = torch.stack([initial_noise(1, index, SHAPE) for index in range(3)])
    prompts = (torch.zeros(3, 1, 1), torch.full((3, 1), offset))
    empty = (torch.zeros(3, 1, 1), torch.zeros(3, 1))
    sampling = SamplingConfig(num_steps=steps, cfg_scale=cfg_scale)
    return denoise(model, noise, prompts, empty, sampling)


@pytest.mark.parametrize("steps", [1, 7, 24])
def test_a_straight_line_is_integrated_exactly(steps: int) -> None:
    torch.testing.assert_close(sample(steps, cfg_scale=1.0), torch.full((3, *SHAPE), 0.25))


def test_guidance_extrapolates_from_the_empty_prompt() -> None:
    # One step from t=1 to 0: the prompt's constant offset is multiplied by cfg_scale.
    torch.testing.assert_close(
        sample(1, cfg_scale=3.0, offset=0.5), torch.full((3, *SHAPE), 0.25 - 3 * 0.5)
    )


def test_latents_have_the_autoencoders_scale_and_shift() -> None:
    latents = sample(4, cfg_scale=1.0, latent_scale=0.5, latent_shift=0.1)
    torch.testing.assert_close(latents, torch.full((3, *SHAPE), 0.25 / 0.5 + 0.1))


def test_the_noise_of_an_image_depends_on_seed_and_number() -> None:
    noise = initial_noise(7, 1, SHAPE)
    assert torch.equal(noise, initial_noise(7, 1, SHAPE))
    assert not torch.equal(noise, initial_noise(8, 1, SHAPE))
    assert not torch.equal(noise, initial_noise(7, 2, SHAPE))


def test_pixels_are_rounded_and_clamped() -> None:
    image = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0]).expand(1, 3, 1, 5)
    (pixels,) = to_pil_images(image)
    assert [pixels.getpixel((x, 0))[0] for x in range(5)] == [0, 0, 128, 255, 255]


def test_a_grid_shows_every_column(tmp_path: Path) -> None:
    red, blue = Image.new("RGB", (8, 8), "red"), Image.new("RGB", (8, 8), "blue")
    columns = [(f"a prompt of some length {n}", [red, blue]) for n in range(7)]
    save_grid(tmp_path / "grid.png", columns, "title")
    grid = Image.open(tmp_path / "grid.png").convert("RGB")
    colours = {colour: count for count, colour in grid.getcolors(1 << 16) or []}
    assert colours[(255, 0, 0)] == colours[(0, 0, 255)] == 7 * 16 * 16
