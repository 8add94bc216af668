"""The cleaned CC12M as MLCommons publishes it: a folder of Arrow streams with images and captions.

Columns: ``png`` (or ``jpg``), Hugging Face's Image: a struct of ``bytes`` and ``path``; ``txt``, the caption;
``__key__``. A stream is memory-mapped once for the spans of its cells, which are then read without Arrow.
Axes: n samples, H W image.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import UInt8
from torch import Tensor

from fluxtrain.data.images.decode import decode
from fluxtrain.data.layouts.arrow import (
    OFFSETS,
    cell_spans,
    read_batches,
    stream_files,
    string_column,
)
from fluxtrain.data.layouts.mlcommons import KEY
from fluxtrain.data.open_files import OpenFiles, read_into
from fluxtrain.data.tar.dataset import SampleError
from fluxtrain.data.tar.index import MAX_CAPTION_BYTES
from fluxtrain.data.tar.members import MAX_MEMBER_BYTES
from fluxtrain.draws import Array
from fluxtrain.errors import DataError

_IMAGE_COLUMNS, _CAPTION = ("png", "jpg"), "txt"


class ArrowImages:
    """The images and captions of a folder that ``datasets.save_to_disk`` wrote."""

    def __init__(self, folder: Path) -> None:
        """Open ``folder``; DataError, naming the file, if one is cut off or has other columns."""
        self._paths = stream_files(folder)
        files = [_read_file(path) for path in self._paths]
        self._spans = np.concatenate([spans for spans, _ in files])
        self._keys = [key for _, keys in files for key in keys]
        numbers = [np.full(len(keys), number) for number, (_, keys) in enumerate(files)]
        self._file_of, self._files = np.concatenate(numbers), OpenFiles(self._paths)
        if not len(self):
            raise DataError(f"{folder}: its files hold no samples")

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._keys)

    def key(self, index: int) -> str:
        """Return the key of sample ``index``."""
        return self._keys[index]

    def name(self, index: int) -> str:
        """Return the file and the key of sample ``index``, for messages."""
        return f"{self._paths[self._file_of[index]]} key {self.key(index)!r:.80}"

    def image(self, index: int) -> UInt8[Tensor, "3 H W"]:
        """Return the image of sample ``index`` on white; SampleError if it is unreadable."""
        try:
            return decode(self._read(index, 0, max_bytes=MAX_MEMBER_BYTES))
        except ValueError as error:
            raise SampleError(f"{self.name(index)}: {error}") from None

    def caption(self, index: int) -> str:
        """Return the prompt of sample ``index``; SampleError if it is not UTF-8."""
        try:
            return self._read(index, 1, max_bytes=MAX_CAPTION_BYTES).decode("utf-8")
        except UnicodeDecodeError:
            raise SampleError(f"{self.name(index)}: its caption is not UTF-8") from None

    def metadata(self, index: int) -> dict[str, Any]:
        """Return {}: training sets have no timesteps."""
        return {}

    def _read(self, index: int, column: int, max_bytes: int) -> bytes:
        offset, size = self._spans[index, column].tolist()
        if not 0 <= size <= max_bytes:
            raise SampleError(f"{self.name(index)}: {size} bytes, at most {max_bytes} are read")
        content = bytearray(size)
        try:
            file = self._files.get(int(self._file_of[index]))
            complete = read_into(file, [memoryview(content)], offset)
        except OSError as error:
            raise SampleError(f"{self.name(index)}: {error.strerror}") from None
        if not complete:
            raise SampleError(f"{self.name(index)}: cut off")
        return bytes(content)


def _read_file(path: Path) -> tuple[Array, list[str]]:
    """Return offset and size of image and caption of each sample in the stream ``path``, and the keys."""
    batches = read_batches(path, _check, _read_batch)
    spans = np.concatenate([np.empty((0, 2, 2), np.int64), *(part for part, _ in batches)])
    keys = [key for _, part in batches for key in part]
    return spans, [key or str(record) for record, key in enumerate(keys)]


def _read_batch(batch: Any, mapped: Any) -> tuple[Array, list[str]]:
    """Return offset and size of image and caption, and the keys."""
    image, caption = batch[_image_column(batch.schema)], batch[_CAPTION]
    for column in (image, caption, *([batch[KEY]] if KEY in batch.schema.names else [])):
        column.validate(full=True)  # Arrow itself follows offsets out of the stream
    if pa.types.is_struct(image.type):
        image = image.flatten()[image.type.get_field_index("bytes")]
    spans = np.stack([cell_spans(image, mapped), cell_spans(caption, mapped)], axis=1)
    return spans, string_column(batch, KEY)


def _image_column(schema: Any) -> str | None:
    return next((name for name in _IMAGE_COLUMNS if name in schema.names), None)


def _check(path: Path, schema: Any) -> None:
    """Raise DataError if ``schema`` has no images and captions."""
    name = _image_column(schema)
    if name is None or _CAPTION not in schema.names:
        existing = ", ".join(map(str, schema.names))[:200]
        raise DataError(f"{path}: columns png and txt are needed; it has {existing}")
    dtype = schema.field(name).type
    if pa.types.is_struct(dtype) and dtype.get_field_index("bytes") >= 0:
        dtype = dtype.field("bytes").type
    if dtype not in OFFSETS or schema.field(_CAPTION).type not in OFFSETS:
        raise DataError(
            f"{path}: column {name!r} is {schema.field(name).type}, not an image's bytes"
        )
