"""Images of every mode become 8-bit RGB on white; damaged and oversized ones raise ValueError."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.trainer.data.formats.tar_files import PILLOW_FORMATS, encode, image, member, open_with

from fluxtrain.data.images import SampleError, decode


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


def bomb(side: int) -> bytes:
    """Return a PNG that claims ``side`` x ``side`` pixels in under a kilobyte."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        crc = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", crc)

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    parts = [chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(bytes(1000))), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize(
    "side",
    [9_000, 10_000, 20_000, 2**31 - 1],  # over our limit; where Pillow warns; where it refuses
)
def test_a_decompression_bomb_is_not_decoded(tmp_path: Path, side: int) -> None:
    data = open_with(tmp_path, member("bomb.png", bomb(side)), member("bomb.txt", b"B"))
    with pytest.raises(SampleError, match=r"a\.tar key 'bomb': its image is unreadable"):
        data.image(0)
    assert data.image(1).shape == (3, 5, 7)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_bomb_that_pillow_only_warns_of_is_not_decoded() -> None:
    with pytest.raises(ValueError, match="10000x10000 pixels, at most 89478485"):
        decode(bomb(10_000), max_pixels=1 << 40)


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
