"""Images with captions in files: read at random without unpacking, decoded as 8-bit RGB, resized.

    folder/
      shard_000000.tar              key.png|jpg|jpeg|webp, key.txt, optional key.json
      shard_000000.tar.index.json   the samples' spans; written on first use

A tar that is not whole raises DataError; a sample without image or caption is listed in ``skipped``; one
that cannot be read later raises SampleError, which the caller counts.

Axes: b batch, n samples, m members of a sample, H W image, side of a square one.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Int64, UInt8
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from fluxtrain.contract.run.data import PIXELS_PER_LATENT
from fluxtrain.data.dataset import (
    EmptyText,
    Encode,
    Encodings,
    ImageBatch,
    Source,
    drawn_fields,
)
from fluxtrain.data.formats.tar import MAX_MEMBER_BYTES, MAX_NAME_LENGTH
from fluxtrain.data.formats.tar_index import (
    MAX_CAPTION_BYTES,
    MAX_METADATA_BYTES,
    Skipped,
    open_index,
)
from fluxtrain.data.order import PADDING
from fluxtrain.errors import DataError
from fluxtrain.runtime.draws import NUM_TIMESTEPS, Array, Draw
from fluxtrain.runtime.files import SharedFiles, max_open_files

MAX_PIXELS = 1 << 26
"""Fewer than those above which Pillow warns of a decompression bomb."""
_BAND_PIXELS = 1 << 22
_FORMATS = ("PNG", "JPEG", "WEBP")


def decode(content: bytes) -> UInt8[Tensor, "3 H W"]:
    """Return the image in ``content``, its transparent parts white; of an animation the first frame.

    Raises ValueError, with the reason, if it is corrupt, not PNG, JPEG or WebP, or above MAX_PIXELS.
    """
    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            width, height = image.size  # from the header: nothing is decoded yet
            if width * height > MAX_PIXELS:
                raise ValueError(f"{width}x{height} pixels, at most {MAX_PIXELS} are decoded")
            pixels = torch.from_numpy(np.array(_rgb(image)))
    except UnidentifiedImageError:
        raise ValueError("its image is neither PNG nor JPEG nor WebP") from None
    except Exception as error:  # decoders may raise anything on malformed bytes, warnings too
        raise ValueError(f"its image is unreadable ({reason_of(error)})") from None
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


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit grey, which Pillow would clip to 8 bits
        return Image.fromarray((np.array(image) >> 8).astype(np.uint8)).convert("RGB")
    return in_bands(image, on_white) if image.has_transparency_data else image.convert("RGB")


def on_white(image: Image.Image) -> Image.Image:
    """Return ``image`` in RGB, its transparent parts white."""
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def in_bands(image: Image.Image, convert: Callable[[Image.Image], Image.Image]) -> Image.Image:
    """Return ``image`` in RGB; what ``convert`` has between takes little memory, as it gets bands."""
    rows = max(1, _BAND_PIXELS // image.width)
    if rows >= image.height:
        return convert(image)
    whole = Image.new("RGB", image.size)
    for top in range(0, image.height, rows):
        band = image.crop((0, top, image.width, min(top + rows, image.height)))
        whole.paste(convert(band), (0, top))
    return whole


def reason_of(error: Exception) -> str:
    """Return the text of an error of Pillow, or its kind if the text is not printable."""
    text = str(error)[:200]
    return text if text and text.isprintable() else type(error).__name__


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


Spans = Int64[np.ndarray[Any, Any], "n 2*m"]
"""Offset and size of each sample's image, caption and, in some sets, metadata."""
_MAX_BYTES = (MAX_MEMBER_BYTES, MAX_CAPTION_BYTES, MAX_METADATA_BYTES)


class SampleError(DataError):
    """One sample cannot be read; the message has its name and the reason."""


class ImageFiles:
    """Images with captions in several files; may be used from several threads and processes."""

    def __init__(self, paths: list[Path], keys: list[list[str]], spans: list[Spans]) -> None:
        """Take the keys and the spans of each file."""
        self._paths, self._keys, self._spans = paths, keys, spans
        self._starts = np.cumsum([0, *map(len, keys)])
        self._files = SharedFiles(paths, max_open=max(1, max_open_files() // 4))

    @property
    def files(self) -> list[Path]:
        return self._paths

    @property
    def starts(self) -> Array:
        """Return the number of samples before each part, and of all."""
        return self._starts

    def __len__(self) -> int:
        return int(self._starts[-1])

    def key(self, index: int) -> str:
        number, record = self._place(index)
        return self._keys[number][record]

    def name(self, index: int) -> str:
        """Return the file and the key of sample ``index``, for messages."""
        key = repr(self.key(index))[: MAX_NAME_LENGTH + 2]
        return f"{self._paths[self._place(index)[0]]} key {key}"

    def caption(self, index: int) -> str:
        """Return the prompt of sample ``index``; SampleError if it is not UTF-8."""
        try:
            return self._read(index, 1).decode("utf-8")
        except UnicodeDecodeError:
            raise SampleError(f"{self.name(index)}: its caption is not UTF-8") from None

    def image(self, index: int) -> UInt8[Tensor, "3 H W"]:
        """Return the image of sample ``index`` on white; SampleError if it is unreadable."""
        content = self._read(index, 0)
        try:
            return decode(content)
        except ValueError as error:
            raise SampleError(f"{self.name(index)}: {error}") from None

    def metadata(self, index: int) -> dict[str, Any]:
        """Return the sample's JSON; {} if there is none or it is not an object."""
        try:
            content = json.loads(self._read(index, 2) or b"{}")
        except (ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}

    def _place(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return number, index - int(self._starts[number])

    def _read(self, index: int, member: int) -> bytes:
        """Return the content of ``member``, none if the set has no such members."""
        number, record = self._place(index)
        span = self._spans[number][record, 2 * member : 2 * member + 2].tolist()
        if not span:
            return b""
        offset, size = span
        if not 0 <= size <= _MAX_BYTES[member]:
            limit = _MAX_BYTES[member]
            raise SampleError(f"{self.name(index)}: {size} bytes, at most {limit} are read")
        try:
            content = self._files.read(number, offset, size)
        except OSError as error:
            raise SampleError(f"{self.name(index)}: {error.strerror}") from None
        if len(content) != size:
            raise SampleError(f"{self.name(index)}: cut off")
        return content


class ImageDataset(Source):
    """The samples of a set, resized to one size."""

    def __init__(self, source: ImageFiles, side: int, min_side: int = 1) -> None:
        """Resize the images of ``source`` to ``side`` x ``side`` pixels.

        An image with a side below ``min_side`` pixels counts as unreadable.
        """
        self.source, self.side, self._min_side = source, side, min_side

    @property
    def files(self) -> list[Path]:
        return self.source.files

    def __len__(self) -> int:
        return len(self.source)

    @property
    def latent_sizes(self) -> Array:
        side = self.side // PIXELS_PER_LATENT
        return np.broadcast_to(np.array([side, side]), (len(self), 2))

    @property
    def starts(self) -> Array:
        return self.source.starts

    def batch(
        self, indices: Array, drawn: Sequence[Draw], empty: EmptyText | None = None
    ) -> ImageBatch:
        """Return the images at ``indices`` with their draws; a dropped prompt is "", padding is black."""
        images = torch.zeros(len(indices), 3, self.side, self.side, dtype=torch.uint8)
        captions, faults, weights = list[str](), list[str](), list[float]()
        for index, draw, image in zip(indices.tolist(), drawn, images, strict=True):
            caption, weight = "", 0.0
            try:
                if index != PADDING:
                    caption, weight = self.read(index, image), 1.0
            except SampleError as error:
                faults.append(str(error))
            captions.append("" if draw.dropped else caption)
            weights.append(weight)
        return ImageBatch(
            images=images,
            captions=tuple(captions),
            weights=torch.tensor(weights),
            faults=tuple(faults),
            **drawn_fields(indices, drawn),
        )

    def encodings(self, indices: Array, encode: Encode | None) -> list[Encodings]:
        """Return the encodings of all samples at ``indices``; an unreadable image is encoded as black."""
        assert encode is not None, "images need encoders"
        images = torch.zeros(len(indices), 3, self.side, self.side, dtype=torch.uint8)
        for index, image in zip(indices.tolist(), images, strict=True):
            with suppress(SampleError):
                self.read(index, image)
        return [encode(images, [self.caption(index) for index in indices.tolist()])]

    def read(self, index: int, image: Tensor) -> str:
        """Fill ``image``, "3 side side", with sample ``index`` and return its caption.

        Raises SampleError, naming the sample, if it cannot be read.
        """
        pixels = self.source.image(index)
        height, width = pixels.shape[1:]
        if min(height, width) < self._min_side:
            raise SampleError(
                f"{self.source.name(index)}: {width} x {height} pixels, "
                f"{self._min_side} are needed on each side"
            )
        caption = self.source.caption(index)
        image.copy_(resize_and_crop(pixels, self.side))
        return caption

    def key(self, index: int) -> str:
        """Return the key of sample ``index``: its COCO image id if it has one, as in MLCommons' sets."""
        image_id = self.source.metadata(index).get("id")
        return str(image_id) if isinstance(image_id, int | str) else self.source.key(index)

    def timestep(self, index: int) -> int | None:
        """Return the stored evaluation timestep (0 ... 7), None if there is none."""
        value = self.source.metadata(index).get("timestep")
        return value if type(value) is int and 0 <= value < NUM_TIMESTEPS else None

    def timesteps(self, indices: Array) -> Array:
        """Return the stored evaluation timesteps, index modulo 8 for samples without one."""
        steps = [(self.timestep(index), index % NUM_TIMESTEPS) for index in indices.tolist()]
        return np.array([default if step is None else step for step, default in steps])

    def caption(self, index: int) -> str:
        """Return the prompt of sample ``index``, "" if it is unreadable."""
        try:
            return self.source.caption(index)
        except SampleError:
            return ""


class TarImages(ImageFiles):
    """The samples of every tar in a folder."""

    def __init__(self, folder: Path) -> None:
        """Open ``folder``.

        Raises DataError, naming the file, if a tar is cut off or not a tar, or if there are no samples.
        """
        paths = sorted(folder.glob("*.tar"))
        if not paths:
            raise DataError(f"{folder}: no tars are here")
        indices = [open_index(path) for path in paths]
        super().__init__(paths, [each.keys for each in indices], [each.spans for each in indices])
        skipped = Skipped()
        for path, index in zip(paths, indices, strict=True):
            for message in index.skipped.messages:
                skipped.add(f"{path}: {message}")
            skipped.count += index.skipped.count - len(index.skipped.messages)
        self.skipped, self.num_skipped = skipped.messages, skipped.count
        if not len(self):
            reason = f": {self.skipped[0]}" if self.skipped else ""
            raise DataError(f"{folder}: its tars hold no images with captions{reason}")
