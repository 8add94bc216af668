"""Sizes of buckets, and the placement of images, compared with the rule of kohya's sd-scripts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fluxtrain.contract.model_base import validate
from fluxtrain.contract.run.data import BucketsConfig, Size
from fluxtrain.data.order import Buckets, Placement
from fluxtrain.errors import ConfigError

KOHYA_512 = [
    *((256, 832), (256, 896), (256, 960), (256, 1024), (320, 704), (320, 768), (384, 640)),
    *((448, 576), (512, 512), (576, 448), (640, 384), (704, 320), (768, 320)),
    *((832, 256), (896, 256), (960, 256), (1024, 256)),
]
"""What kohya prints for 512 x 512 pixels with its defaults: sides of 256 to 1024 in steps of 64."""


def test_sizes_are_kohyas() -> None:
    assert BucketsConfig(min_side=256, max_side=1024).sizes(512) == KOHYA_512


def test_the_bucket_of_1280_x_768() -> None:
    """With steps of 128 at 1024 x 1024 pixels, as in the published runs on one MI300X."""
    sizes = BucketsConfig(step=128, max_side=1280).sizes(1024)
    assert (1280, 768) in sizes
    (placement,) = _buckets(1024, step=128).placements(1920, 1152)
    assert placement == Placement((1280, 768), (1280, 768))
    assert placement.latent_size == (96, 160)


def test_sides_are_half_to_twice_the_resolution_if_none_are_given() -> None:
    for resolution, step in [(1024, 64), (1000, 64), (512, 128), (64, 16), (16, 16)]:
        config = BucketsConfig(step=step)
        sizes = config.sizes(resolution)
        shortest, longest = min(map(min, sizes)), max(map(max, sizes))
        assert resolution / 2 <= shortest
        assert longest <= 2 * resolution
        assert all(w % step == h % step == 0 and w * h <= resolution**2 for w, h in sizes)
        assert sorted((h, w) for w, h in sizes) == sizes


@pytest.mark.parametrize("resolution", [512, 1024])
def test_images_go_to_the_nearest_aspect_ratio(resolution: int) -> None:
    buckets = _buckets(resolution, min_side=256, max_side=1024)
    sizes = buckets.config.sizes(resolution)
    for width, height in _images():
        (placement,) = buckets.placements(width, height)
        assert placement.size == _nearest(sizes, width, height), (width, height)
        scale = max(placement.size[0] / width, placement.size[1] / height)
        assert placement.resized == (int(width * scale + 0.5), int(height * scale + 0.5))
        _require_inside(placement)


def test_without_upscaling_images_shrink_to_the_area_or_keep_their_size() -> None:
    buckets = _buckets(512, upscale=False, max_side=32_768)
    for width, height in _images():
        (placement,) = buckets.placements(width, height)
        _require_inside(placement)
        assert placement.size == _kohya_no_upscale(width, height, 512), (width, height)
        if width * height <= 512**2:
            assert placement.resized == (width, height)
        else:
            assert math.prod(placement.size) <= 1.05 * 512**2


def test_sides_are_limited_without_upscaling_too() -> None:
    (placement,) = _buckets(512, upscale=False).placements(10_000, 1000)
    assert placement.size == (1024, 128)
    assert placement.resized == (1280, 128)


def test_an_image_is_a_sample_in_each_resolution() -> None:
    both = Buckets(BucketsConfig(), (512, 1024))
    assert [p.size for p in both.placements(1000, 1000)] == [(512, 512), (1024, 1024)]
    small = Buckets(BucketsConfig(upscale=False), (512, 1024))
    assert [p.size for p in small.placements(400, 500)] == [(384, 448)]


def test_an_image_that_is_too_small_is_refused_with_its_size() -> None:
    with pytest.raises(ValueError, match="60 x 900 pixels: a side is shorter than 64"):
        _buckets(512, upscale=False).placements(60, 900)
    with pytest.raises(ValueError, match="1 x 20000 pixels"):
        _buckets(512, upscale=False).placements(1, 20_000)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"step": 40}, "multiple of 16"),
        ({"min_side": 100}, "multiple of"),
        ({"min_side": 320, "step": 128}, "min_side.*multiple of step; step is 128"),
        ({"max_side": 1088, "step": 128}, "max_side.*multiple of step"),
        ({"resolutions": [512, 48]}, "resolutions.*at least step; step is 64"),
        ({"resolutions": [256], "min_side": 512}, "min_side.*at most the smallest"),
        ({"resolutions": [1024], "max_side": 512}, "max_side.*at least the largest"),
        ({"resolutions": [1000]}, "multiple of 16"),
    ],
)
def test_wrong_fields_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(BucketsConfig, values, "spec.run.data.buckets")


def _buckets(resolution: int, **fields: Any) -> Buckets:
    return Buckets(BucketsConfig(**fields), (resolution,))


def _images() -> list[Size]:
    """Return sizes of images: usual ones, those of buckets, and random ones down to 70 pixels."""
    drawn = np.random.default_rng(0).integers(70, 3000, (400, 2)).tolist()
    return [(1920, 1080), (512, 512), (640, 384), (1024, 256), *map(tuple, drawn)]


def _require_inside(placement: Placement) -> None:
    left, top, right, bottom = placement.box
    assert left >= 0 <= top
    assert (right - left, bottom - top) == placement.size
    assert right <= placement.resized[0]
    assert bottom <= placement.resized[1]
    assert abs(placement.resized[0] - right - left) <= 1  # the middle
    assert abs(placement.resized[1] - bottom - top) <= 1


def _nearest(sizes: Any, width: int, height: int) -> Size:
    """Return kohya's choice: the size itself if there is one, else the least difference of aspect ratios."""
    if (width, height) in sizes:
        return width, height
    aspects = np.array([w / h for w, h in sizes])
    found: Size = sizes[int(np.abs(aspects - width / height).argmin())]
    return found


def _kohya_no_upscale(width: int, height: int, resolution: int) -> Size:
    """Return kohya's bucket with ``bucket_no_upscale`` and steps of 64."""
    aspect = width / height
    if width * height > resolution**2:
        w = resolution * aspect**0.5
        h = resolution / aspect**0.5
        by_width = _steps(w), _steps(_steps(w) / aspect)
        by_height = _steps(_steps(h) * aspect), _steps(h)
        errors = [abs(a / b - aspect) for a, b in (by_width, by_height)]
        return by_width if errors[0] < errors[1] else by_height
    return width // 64 * 64, height // 64 * 64


def _steps(side: float) -> int:
    return math.floor(side + 0.5) // 64 * 64
