"""The format of prepared images: 256 x 256 pixels, RGB, PNG."""

from __future__ import annotations

import io
import re
from typing import Any

import PIL
from PIL import Image

SIZE = 256
"""Height and width in pixels."""
PNG_LEVEL = 1
"""zlib level: two thirds of the time of Pillow's default, a tenth more bytes (docs/log.md)."""

SETTINGS: dict[str, Any] = {
    "format": 1,
    "size": SIZE,
    "png_level": PNG_LEVEL,
    "pillow": PIL.__version__,
}
"""What the bytes of prepared images depend on; a staging directory with other settings is emptied."""


def encode(image: Image.Image) -> bytes:
    """Return ``image`` as an RGB PNG."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "PNG", compress_level=PNG_LEVEL)
    return buffer.getvalue()


def error_summary(error: Exception) -> str:
    """Return type and message of ``error``: at most 200 printable characters, without memory addresses."""
    text = re.sub(r" at 0x[0-9a-f]+", "", f"{type(error).__name__}: {error}")[:200]
    return text if text.isprintable() else type(error).__name__
