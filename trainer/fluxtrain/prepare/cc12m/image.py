"""Cleans one CC12M image as the MLPerf reference does: short side 256, center crop of the long side.

The reference reads with Hugging Face's ``datasets`` (EXIF orientation applied), resizes and crops with
torchvision, and converts to RGB in training; here all of it is done once. The pixels are bit-identical to the
reference's: see docs/data.md.
"""

from __future__ import annotations

import io
import warnings

from PIL import ExifTags, Image, ImageOps

from fluxtrain.prepare.image import SIZE, encode, error_summary

_MAX_PIXELS = 178_956_970
"""Pillow's limit against decompression bombs, which the reference uses too."""
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""Some of Pillow's other formats start external programs; the raw set is all JPEG."""
UNREADABLE = "unreadable image"
SMALL = f"a side below {SIZE} pixels"


class RejectedError(ValueError):
    """The sample is dropped; ``reason`` is one of a few, ``detail`` is specific to the sample."""

    def __init__(self, reason: str, detail: str = "") -> None:
        """Take the reason, which is counted, and the detail, which is only logged."""
        super().__init__(reason)
        self.reason, self.detail = reason, detail


def clean(content: bytes) -> bytes:
    """Return the image file ``content`` as a PNG of 256 x 256 pixels, RGB.

    Raises RejectedError if it is unreadable or has a side below 256 pixels.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # large images and odd EXIF, which the reference keeps
            return _clean(content)
    except (RejectedError, MemoryError):
        raise
    except Exception as error:  # on malformed bytes a decoder may raise anything
        raise RejectedError(UNREADABLE, error_summary(error)) from None


def _clean(content: bytes) -> bytes:
    with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
        width, height = image.size  # from the header: nothing is decoded yet
        if min(width, height) < SIZE:
            raise RejectedError(SMALL, f"{width} x {height}")
        if width * height > _MAX_PIXELS:
            raise RejectedError(
                UNREADABLE, f"{width} x {height} pixels, at most {_MAX_PIXELS} are decoded"
            )
        image.load()
        return encode(_center_crop(_resize(_apply_orientation(image))))


def _apply_orientation(image: Image.Image) -> Image.Image:
    """Return ``image`` rotated by its EXIF orientation; raises if the EXIF is damaged, like the reference."""
    if image.getexif().get(ExifTags.Base.Orientation) is None:
        return image
    return ImageOps.exif_transpose(image)


def _resize(image: Image.Image) -> Image.Image:
    """Return ``image`` with its short side at 256; the long side is rounded down, as in torchvision."""
    short, long = sorted(image.size)
    if short == SIZE:
        return image
    other = SIZE * long // short
    size = (SIZE, other) if image.width <= image.height else (other, SIZE)
    return image.resize(size, Image.Resampling.BICUBIC)


def _center_crop(image: Image.Image) -> Image.Image:
    """Return the central square; half pixels are rounded to even, as in torchvision."""
    left, top = round((image.width - SIZE) / 2), round((image.height - SIZE) / 2)
    return image.crop((left, top, left + SIZE, top + SIZE))
