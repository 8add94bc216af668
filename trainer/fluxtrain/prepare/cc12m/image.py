"""One CC12M picture as the MLPerf reference cleans it: 256 on the short side, the middle of the long one.

The reference reads with Hugging Face's ``datasets`` (EXIF orientation applied), resizes and crops with
torchvision, and converts to RGB when it trains; here that is done once, and the result is lossless.
Equal to theirs to the last bit: see docs/data.md.
"""

from __future__ import annotations

import io
import warnings

from PIL import ExifTags, Image, ImageOps

from fluxtrain.prepare.image import SIZE, encode, error_summary

_MAX_PIXELS = 178_956_970
"""Where Pillow refuses a decompression bomb, and the reference with it."""
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""Pillow has more, some of which start other programs; the raw set is JPEG throughout."""
UNREADABLE = "unreadable image"
SMALL = f"a side below {SIZE} pixels"


class RejectedError(ValueError):
    """A sample that is left out; ``reason`` is one of few, ``detail`` is the decoder's own word."""

    def __init__(self, reason: str, detail: str = "") -> None:
        """Take why, in words that many samples share, and what is special to this one."""
        super().__init__(reason)
        self.reason, self.detail = reason, detail


def clean(content: bytes) -> bytes:
    """Return the image file ``content`` as a PNG of 256 x 256 pixels, RGB.

    Raises RejectedError where it is unreadable or has a side below 256 pixels.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # of large images and odd EXIF, which the reference keeps
            return _cleaned(content)
    except (RejectedError, MemoryError):
        raise
    except Exception as error:  # a decoder of hostile bytes may raise anything
        raise RejectedError(UNREADABLE, error_summary(error)) from None


def _cleaned(content: bytes) -> bytes:
    with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
        width, height = image.size  # from the header: nothing is decoded yet
        if min(width, height) < SIZE:
            raise RejectedError(SMALL, f"{width} x {height}")
        if width * height > _MAX_PIXELS:
            raise RejectedError(
                UNREADABLE, f"{width} x {height} pixels, at most {_MAX_PIXELS} are decoded"
            )
        image.load()
        return encode(_cropped(_resized(_upright(image))))


def _upright(image: Image.Image) -> Image.Image:
    """Return ``image`` turned as its EXIF says; raises where the EXIF is damaged, as the reference does."""
    if image.getexif().get(ExifTags.Base.Orientation) is None:
        return image
    return ImageOps.exif_transpose(image)


def _resized(image: Image.Image) -> Image.Image:
    """Return ``image`` with its short side at 256, in its own mode; torchvision rounds the other one down."""
    short, long = sorted(image.size)
    if short == SIZE:
        return image
    other = SIZE * long // short
    size = (SIZE, other) if image.width <= image.height else (other, SIZE)
    return image.resize(size, Image.Resampling.BICUBIC)


def _cropped(image: Image.Image) -> Image.Image:
    """Return the middle; halves are rounded to the even side, as torchvision rounds them."""
    left, top = round((image.width - SIZE) / 2), round((image.height - SIZE) / 2)
    return image.crop((left, top, left + SIZE, top + SIZE))
