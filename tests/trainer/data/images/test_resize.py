"""Elongated images are cropped before they are resized, and large ones are converted in bands."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from fluxtrain.data import images
from fluxtrain.data import images as tar_images
from fluxtrain.data.pictures import picture


@pytest.mark.parametrize("size", [(90, 31), (31, 90), (64, 64), (40, 200)])
@pytest.mark.parametrize("kernel", [Image.Resampling.BICUBIC, Image.Resampling.LANCZOS])
def test_a_part_is_resized_as_the_whole_is(
    monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], kernel: Image.Resampling
) -> None:
    width, height = size
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    waves = np.stack([127 + 100 * np.sin(x / 5), 127 + 100 * np.cos(y / 7), (x + y) % 200], axis=2)
    image = Image.fromarray(waves.astype(np.uint8))
    side = 48
    short = min(size)
    resized = side * width // short, side * height // short
    left, top = (resized[0] - side) // 2, (resized[1] - side) // 2
    box = (left, top, left + side, top + side)
    whole = np.array(images.resize_crop(image, resized, box, kernel)).astype(int)
    monkeypatch.setattr(images, "MAX_RESIZED_PIXELS", 0)
    part = np.array(images.resize_crop(image, resized, box, kernel)).astype(int)
    assert part.shape == whole.shape == (side, side, 3)
    assert np.abs(part - whole).mean() < 0.2
    assert np.abs(part - whole).max() <= 16  # where 8 bits clip between the passes


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "F"])
def test_bands_are_converted_as_the_whole_is(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    rng = np.random.default_rng(0)
    pixels = Image.fromarray(rng.integers(0, 256, (13, 9, 4), dtype=np.uint8))
    if mode == "F":
        image = Image.fromarray(rng.random((13, 9), dtype=np.float32))
    elif mode == "I;16":
        image = Image.fromarray(rng.integers(0, 1 << 16, (13, 9), dtype=np.uint16))
    else:
        image = (pixels if mode in ("LA", "RGBA") else pixels.convert("RGB")).convert(mode)
    file = io.BytesIO()
    image.save(file, "TIFF" if mode in ("F", "CMYK", "I;16") else "PNG")
    found = []
    for band in (1 << 22, 20):
        monkeypatch.setattr(picture, "_BAND_PIXELS", band)
        monkeypatch.setattr(tar_images, "_BAND_PIXELS", band)
        found.append([np.array(picture.decode(file.getvalue()))])
        if mode not in ("F", "CMYK", "I;16"):
            found[-1].append(tar_images.decode(file.getvalue()).numpy())
    for whole, in_bands in zip(*found, strict=True):
        assert np.array_equal(whole, in_bands)
