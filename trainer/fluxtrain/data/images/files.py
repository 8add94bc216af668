"""The base of image data sets in files: finds samples by index, decodes them, and names unreadable ones.

Axes: n samples, m members of a sample, H W image.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt8
from torch import Tensor

from fluxtrain.data.images.decode import MAX_PIXELS, decode
from fluxtrain.data.open_files import SharedFiles, max_open_files
from fluxtrain.data.tar.index import MAX_CAPTION_BYTES, MAX_METADATA_BYTES
from fluxtrain.data.tar.members import MAX_MEMBER_BYTES, MAX_NAME_LENGTH
from fluxtrain.draws import Array
from fluxtrain.errors import DataError

Spans = Int64[np.ndarray[Any, Any], "n 2*m"]
"""Offset and size of each sample's image, caption and, in some sets, metadata."""
_MAX_BYTES = (MAX_MEMBER_BYTES, MAX_CAPTION_BYTES, MAX_METADATA_BYTES)


class SampleError(DataError):
    """One sample cannot be read; the message has its name and the reason."""


class ImageFiles:
    """Images with captions in several files; may be used from several threads and processes."""

    def __init__(
        self,
        paths: list[Path],
        keys: list[list[str]],
        spans: list[Spans],
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        """Take the keys and the spans of each file; images of more than ``max_pixels`` are not decoded."""
        self._paths, self._keys, self._spans, self._max_pixels = paths, keys, spans, max_pixels
        self._starts = np.cumsum([0, *map(len, keys)])
        self._files = SharedFiles(paths, max_open=max(1, max_open_files() // 4))

    @property
    def files(self) -> list[Path]:
        """Return the files that samples are read from."""
        return self._paths

    @property
    def starts(self) -> Array:
        """Return the number of samples before each part, and of all."""
        return self._starts

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(self._starts[-1])

    def key(self, index: int) -> str:
        """Return the key of sample ``index``."""
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
            return decode(content, self._max_pixels)
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
        """Return the number of the file of sample ``index``, and its record there."""
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
