"""Resizes and crops an image with bounded memory, however elongated it is."""

from __future__ import annotations

from PIL import Image

MAX_RESIZED_PIXELS = 1 << 26
"""An image that would have more pixels once it is resized is cropped first."""
Box = tuple[int, int, int, int]


def resize_crop(
    image: Image.Image, size: tuple[int, int], box: Box, kernel: Image.Resampling
) -> Image.Image:
    """Return the part ``box`` of ``image`` resized to ``size``, width and height.

    Up to MAX_RESIZED_PIXELS it is resized as a whole, as references do it. Beyond, as of 40,000 x 1 pixels,
    only the part is computed: the same, but for the rounding between the two passes of the filter.
    """
    if size[0] * size[1] <= MAX_RESIZED_PIXELS:
        whole = image if image.size == size else image.resize(size, kernel)
        return whole.crop(box)
    scale = image.width / size[0], image.height / size[1]
    left, top, right, bottom = (edge * scale[axis % 2] for axis, edge in enumerate(box))
    part = (left, top, min(right, image.width), min(bottom, image.height))
    return image.resize((box[2] - box[0], box[3] - box[1]), kernel, part)
