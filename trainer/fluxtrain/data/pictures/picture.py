"""Decodes pictures as people have them into 8-bit sRGB, and fits them to a size.

Axes: H W image.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from threading import Lock

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError
from torch import Tensor

from fluxtrain.data.buckets import Placement
from fluxtrain.data.images.resize import resize_crop

DECODER = 1
"""Version of this module's output; it is part of the names in a cache."""
MAX_BYTES = 1 << 29
MAX_PIXELS = 1 << 27
"""Largest picture that is decoded: 134 megapixels, 400 MB of RGB; a WebP may have half, see SECURITY.md."""
MAX_ENLARGEMENT = 8
"""A picture that would be enlarged by more than this factor is no training data."""
_LARGE_PIXELS = 1 << 25
_LARGE_ONES = Lock()
"""Held while a large picture is decoded: of those that threads decode at once, one may be large."""
_BAND_PIXELS = 1 << 22
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "AVIF")
_ORIENTATION, _QUARTER_TURNS = 0x0112, (5, 6, 7, 8)
_SIXTEEN_BITS = ("I;16", "I;16B", "I;16L", "I", "F")


class PictureError(ValueError):
    """A picture cannot be used; the message says why."""


def read_bytes(path: Path) -> bytes:
    """Return the contents of ``path``; PictureError if it is too large, OSError if it cannot be read."""
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise PictureError(f"has more than {MAX_BYTES:,} bytes")
    return content


def picture_size(content: bytes) -> tuple[int, int]:
    """Return width and height of the picture in ``content`` as it is seen, from its header alone.

    Raises PictureError if it is no picture, or has too many pixels.
    """
    with _opened(content) as image:
        return _seen_size(image)


def decode(content: bytes, at_least: tuple[int, int] | None = None) -> Image.Image:
    """Return the picture in ``content`` in RGB, turned by its EXIF orientation, its transparent parts white.

    Of an animation the first frame. Colour profiles are converted to sRGB. A JPEG may be decoded at a half,
    a quarter or an eighth of its size, but no smaller than ``at_least``, width and height.

    Raises PictureError, with the reason, if it is corrupt, cut off or too large.
    """
    with _opened(content) as image:
        if at_least is not None and image.format in ("JPEG", "MPO"):
            turned = image.getexif().get(_ORIENTATION) in _QUARTER_TURNS
            image.draft(None, at_least[::-1] if turned else at_least)
        with _alone_if_large(image):
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
            return _rgb_in_bands(image)


def decode_alpha(content: bytes) -> Image.Image:
    """Return the opacity of the picture in ``content``, white where it is opaque, turned as `decode` does.

    Raises PictureError, with the reason, if it is corrupt, cut off or too large.
    """
    with _opened(content) as image, _alone_if_large(image):
        image.load()
        turned = ImageOps.exif_transpose(image)
        if not turned.has_transparency_data:
            return Image.new("L", turned.size, 255)
        return turned.convert("RGBA").getchannel("A")


def _alone_if_large(image: Image.Image) -> AbstractContextManager[object]:
    """Return what is held while ``image`` is decoded."""
    return _LARGE_ONES if image.width * image.height > _LARGE_PIXELS else nullcontext()


def fit(image: Image.Image, placement: Placement) -> UInt8[Tensor, "3 H W"]:
    """Return ``image``, resized, cropped and mirrored by ``placement``."""
    part = resize_crop(image, placement.resized, placement.box, Image.Resampling.LANCZOS)
    pixels = np.array(part)
    if placement.is_flipped:
        pixels = np.ascontiguousarray(pixels[:, ::-1])
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def require_enough_pixels(width: int, height: int, placement: Placement) -> None:
    """Raise PictureError if a picture of ``width`` x ``height`` would be enlarged too much."""
    factor = max(placement.resized[0] / width, placement.resized[1] / height)
    if factor > MAX_ENLARGEMENT:
        raise PictureError(
            f"{width} x {height} pixels would be enlarged {factor:.0f} times; "
            f"at most {MAX_ENLARGEMENT} times is allowed"
        )


@contextmanager
def _opened(content: bytes) -> Iterator[Image.Image]:
    """Yield the picture, of which nothing is decoded yet; any error of a decoder becomes a PictureError."""
    if not content:
        raise PictureError("the file is empty")
    try:
        with warnings.catch_warnings():  # of a decompression bomb; the limit here is another
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            opened = Image.open(io.BytesIO(content), formats=_readable())
        with opened as image:
            width, height = image.size
            most = MAX_PIXELS // 2 if image.format == "WEBP" else MAX_PIXELS
            if width * height > most:
                raise PictureError(
                    f"{width} x {height} pixels; at most {most:,} pixels are decoded"
                )
            yield image
    except PictureError:
        raise
    except Image.DecompressionBombError:
        raise PictureError(f"at most {MAX_PIXELS:,} pixels are decoded, and it has more") from None
    except UnidentifiedImageError:
        raise PictureError("no picture in a format that is read (PNG, JPEG, WebP ...)") from None
    except Exception as error:  # decoders may raise anything on malformed bytes, warnings too
        raise PictureError(f"corrupt or cut off ({_reason(error)})") from None


@cache
def _readable() -> tuple[str, ...]:
    """Return the formats that this build of Pillow reads."""
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def _seen_size(image: Image.Image) -> tuple[int, int]:
    width, height = image.size
    turned = image.getexif().get(_ORIENTATION) in _QUARTER_TURNS
    return (height, width) if turned else (width, height)


def _rgb_in_bands(image: Image.Image) -> Image.Image:
    """Return ``image`` in RGB; converted in bands, so that what is between takes little memory."""
    is_unit = image.mode == "F" and float(image.getextrema()[1]) <= 1  # type: ignore[arg-type]
    rows = max(1, _BAND_PIXELS // image.width)
    if rows >= image.height or (image.mode == "RGB" and not image.info):
        return _rgb(image, is_unit)
    whole = Image.new("RGB", image.size)
    for top in range(0, image.height, rows):
        band = image.crop((0, top, image.width, min(top + rows, image.height)))
        whole.paste(_rgb(band, is_unit), (0, top))
    return whole


def _rgb(image: Image.Image, is_unit: bool) -> Image.Image:
    """Return ``image`` in RGB; floats are from 0 to 1 if ``is_unit``."""
    if image.mode in _SIXTEEN_BITS:
        return _eight_bits(image, is_unit).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return _srgb(Image.alpha_composite(white, image).convert("RGB"), _profile(image))
    return _srgb(image, _profile(image)).convert("RGB")


def _eight_bits(image: Image.Image, is_unit: bool) -> Image.Image:
    """Return a picture of 16-bit or float greys, which Pillow would clip, in 8 bits."""
    values = np.asarray(image).astype(np.float64)
    if is_unit:
        values = values * 65535
    return Image.fromarray(np.clip(values / 256, 0, 255).astype(np.uint8))


def _profile(image: Image.Image) -> bytes | None:
    profile = image.info.get("icc_profile")
    return profile if isinstance(profile, bytes) and profile else None


def _srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    """Return ``image`` converted from the colours of ``profile``; unchanged if that is none of its mode."""
    if profile is None or image.mode not in ("RGB", "CMYK", "L"):
        return image
    with suppress(ImageCms.PyCMSError, OSError, ValueError):
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        target = ImageCms.createProfile("sRGB")
        converted = ImageCms.profileToProfile(image, source, target, outputMode="RGB")
        return converted if converted is not None else image
    return image


def _reason(error: Exception) -> str:
    text = str(error)[:200]
    return text if text and text.isprintable() else type(error).__name__
