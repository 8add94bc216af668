"""Images of every mode, shape and source become 8-bit RGB on white; damaged ones are refused."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from tests.trainer.bombs.pictures import png_that_claims
from tests.trainer.data.formats.encoded_sets import save_stream
from tests.trainer.data.formats.tar_files import PILLOW_FORMATS, encode, image, member, open_with
from tests.trainer.data.small_runs import batches, image_run
from tests.trainer.tiny_encoders import png, small_image

from fluxtrain.contract.process import RunPaths
from fluxtrain.data import images
from fluxtrain.data.dataset import ImageBatch
from fluxtrain.data.images import SampleError, TarImages, decode
from fluxtrain.data.pictures import picture
from fluxtrain.errors import DataError

pytestmark = pytest.mark.slow


def test_transparent_parts_become_white() -> None:
    rgba = np.zeros((1, 3, 4), dtype=np.uint8)
    rgba[0, :, 3] = (0, 255, 51)
    for suffix in ("png", "webp"):
        options = {"lossless": True, "exact": True} if suffix == "webp" else {}
        decoded = decode(encode(Image.fromarray(rgba), suffix, **options))
        assert decoded[:, 0].tolist() == [[255, 0, 204]] * 3


def test_a_palette_with_transparency_is_put_on_white() -> None:
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putdata([0, 1])
    decoded = decode(encode(palette, transparency=bytes([0, 255])))
    assert decoded[:, 0].tolist() == [[255, 40], [255, 50], [255, 60]]


def test_16_bit_grey_keeps_its_upper_8_bits() -> None:
    grey = Image.fromarray(np.array([[0, 300, 0x8000, 65535]], dtype=np.uint16))
    assert decode(encode(grey))[:, 0].tolist() == [[0, 1, 128, 255]] * 3


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    decoded = decode(encode(Image.new(mode, (4, 2)), "jpg" if mode == "CMYK" else "png"))
    assert (decoded.dtype, tuple(decoded.shape)) == (torch.uint8, (3, 2, 4))


@pytest.mark.parametrize(
    "side",
    [9_000, 10_000, 20_000, 2**31 - 1],  # over our limit; where Pillow warns; where it refuses
)
def test_a_decompression_bomb_is_not_decoded(tmp_path: Path, side: int) -> None:
    data = open_with(
        tmp_path, member("bomb.png", png_that_claims(side, side)), member("bomb.txt", b"B")
    )
    with pytest.raises(SampleError, match=r"a\.tar key 'bomb': its image is unreadable"):
        data.image(0)
    assert data.image(1).shape == (3, 5, 7)


def test_random_damage_raises_nothing_but_value_error() -> None:
    rng, outcomes = np.random.default_rng(0), set[str]()
    for suffix in PILLOW_FORMATS:
        whole = np.frombuffer(image(0, suffix), dtype=np.uint8)
        for _ in range(100):
            damaged = whole.copy()
            damaged[rng.integers(0, len(whole), 4)] = rng.integers(0, 256, 4)
            try:
                outcomes.add(str(decode(damaged.tobytes()).dtype))
            except ValueError as error:
                outcomes.add(str(error))
    assert "torch.uint8" in outcomes
    assert len(outcomes) > 5
    assert all(outcome.isprintable() for outcome in outcomes)


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
        monkeypatch.setattr(images, "_BAND_PIXELS", band)
        found.append([np.array(picture.decode(file.getvalue()))])
        if mode not in ("F", "CMYK", "I;16"):
            found[-1].append(decode(file.getvalue()).numpy())
    for whole, in_bands in zip(*found, strict=True):
        assert np.array_equal(whole, in_bands)


def save_published(prepared: RunPaths, folder: Path) -> None:
    """Write the training images as MLCommons publishes the cleaned CC12M: Hugging Face's Image and text."""
    datasets.disable_progress_bars()
    tars = TarImages(prepared.data / "train")
    columns = {
        "png": [png(small_image(index)) for index in range(len(tars))],
        "txt": [tars.caption(index) for index in range(len(tars))],
        "__key__": [tars.key(index) for index in range(len(tars))],
        "width": [32] * len(tars),
    }
    published = datasets.Dataset.from_dict(columns).cast_column("png", datasets.Image())
    published.save_to_disk(str(folder), num_shards=2)


def test_published_images_equal_those_of_the_tars(prepared: RunPaths, tmp_path: Path) -> None:
    save_published(prepared, tmp_path / "train")
    from_arrow = batches(image_run(data={"num_workers": 2}), tmp_path)
    from_tars = batches(image_run(), prepared.data)
    for ours, theirs in zip(from_arrow, from_tars, strict=True):
        assert isinstance(ours, ImageBatch)
        assert isinstance(theirs, ImageBatch)
        assert torch.equal(ours.images, theirs.images)
        assert (ours.captions, ours.faults) == (theirs.captions, ())


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"png": ["text"], "title": ["a"]}, "columns png and txt are needed; it has png, title"),
        ({"png": [3], "txt": ["a"]}, "column 'png' is int64, not an image's bytes"),
    ],
)
def test_streams_without_images_are_refused(
    tmp_path: Path, columns: dict[str, Any], message: str
) -> None:
    save_stream(tmp_path / "train" / "a.arrow", pa.table(columns))
    with pytest.raises(DataError, match=message):
        next(batches(image_run(), tmp_path))


def test_random_damage_raises_nothing_but_data_error(prepared: RunPaths, tmp_path: Path) -> None:
    save_published(prepared, tmp_path / "train")
    path, rng = tmp_path / "train/data-00000-of-00002.arrow", np.random.default_rng(0)
    content, num_refused = path.read_bytes(), 0
    for _ in range(60):
        damaged = bytearray(content)
        for place in rng.integers(0, 4000, 8):  # where the schema and the offsets are
            damaged[place] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            next(batches(image_run(), tmp_path))
        except DataError:
            num_refused += 1
    assert num_refused > 0
