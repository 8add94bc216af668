"""Decodes untrusted image files into 8-bit RGB.

Axes: H W image, side of a square one.
"""

from __future__ import annotations

import io

import numpy as np
import torch
from einops import rearrange
from jaxtyping import UInt8
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from fluxtrain.data.images.resize import resize_crop

MAX_PIXELS = 1 << 26
_BAND_PIXELS = 1 << 22
_FORMATS = ("PNG", "JPEG", "WEBP")
_PILLOW_LIMIT = 89_478_485
"""Pixels above which Pillow only warns of a decompression bomb; we refuse them."""


def decode(content: bytes, max_pixels: int = MAX_PIXELS) -> UInt8[Tensor, "3 H W"]:
    """Return the image in ``content``, its transparent parts white; of an animation the first frame.

    Raises ValueError, with the reason, if it is corrupt, not PNG, JPEG or WebP, or above ``max_pixels``.
    """
    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            _check_size(image, min(max_pixels, _PILLOW_LIMIT))
            pixels = torch.from_numpy(np.array(_on_white(image)))
    except UnidentifiedImageError:
        raise ValueError("its image is neither PNG nor JPEG nor WebP") from None
    except Exception as error:  # decoders may raise anything on malformed bytes, warnings too
        raise ValueError(f"its image is unreadable ({_reason(error)})") from None
    return rearrange(pixels, "h w c -> c h w").contiguous()


def resize_and_crop(pixels: UInt8[Tensor, "3 H W"], side: int) -> UInt8[Tensor, "3 side side"]:
    """Return ``pixels`` with the short side resized to ``side`` (bicubic) and the long one center-cropped.

    An image of that size is returned unchanged.
    """
    height, width = pixels.shape[1:]
    if (height, width) == (side, side):
        return pixels
    short = min(height, width)
    size = side * width // short, side * height // short
    image = Image.fromarray(rearrange(pixels, "c h w -> h w c").numpy())
    left, top = round((size[0] - side) / 2), round((size[1] - side) / 2)
    box = (left, top, left + side, top + side)
    middle = resize_crop(image, size, box, Image.Resampling.BICUBIC)
    return rearrange(torch.from_numpy(np.array(middle)), "h w c -> c h w").contiguous()


def _check_size(image: Image.Image, max_pixels: int) -> None:
    width, height = image.size  # from the header: nothing is decoded yet
    if width * height > max_pixels:
        raise ValueError(f"{width}x{height} pixels, at most {max_pixels} are decoded")


def _on_white(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit grey, which Pillow would clip to 8 bits
        return Image.fromarray((np.array(image) >> 8).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    whole = Image.new("RGB", image.size)
    rows = max(1, _BAND_PIXELS // image.width)
    for top in range(0, image.height, rows):  # what is between takes little memory
        band = image.crop((0, top, image.width, min(top + rows, image.height)))
        white = Image.new("RGBA", band.size, "white")
        whole.paste(Image.alpha_composite(white, band.convert("RGBA")).convert("RGB"), (0, top))
    return whole


def _reason(error: Exception) -> str:
    text = str(error)[:200]
    return text if text and text.isprintable() else type(error).__name__
