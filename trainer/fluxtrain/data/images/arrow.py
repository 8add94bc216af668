"""The cleaned CC12M as MLCommons publishes it: a folder of Arrow streams with pictures and captions.

Columns: ``png`` (or ``jpg``), Hugging Face's Image: a struct of ``bytes`` and ``path``; ``txt``, the caption;
``__key__``. A stream is mapped once to find its cells; they are then read without Arrow.
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
from fluxtrain.data.layouts.arrow import OFFSETS, read_batches, spans, stream_files, texts
from fluxtrain.data.layouts.mlcommons import KEY
from fluxtrain.data.open_files import OpenFiles, fill
from fluxtrain.data.tar.dataset import SampleError
from fluxtrain.data.tar.index import MAX_CAPTION_BYTES
from fluxtrain.data.tar.members import MAX_MEMBER_BYTES
from fluxtrain.draws import Array
from fluxtrain.errors import DataError

_IMAGE_COLUMNS, _CAPTION = ("png", "jpg"), "txt"


class ArrowImages:
    """The pictures and captions of a folder that ``datasets.save_to_disk`` wrote."""

    def __init__(self, folder: Path) -> None:
        """Open ``folder``; DataError, naming the file, where one is cut off or has other columns."""
        self._paths = stream_files(folder)
        found = [_places(path) for path in self._paths]
        self._spans = np.concatenate([places for places, _ in found])
        self._keys = [key for _, keys in found for key in keys]
        numbers = [np.full(len(keys), number) for number, (_, keys) in enumerate(found)]
        self._file_of, self._files = np.concatenate(numbers), OpenFiles(self._paths)
        if not len(self):
            raise DataError(f"{folder}: its files hold no samples")

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._keys)

    def key(self, index: int) -> str:
        """Return the name of sample ``index`` in the set it was made from."""
        return self._keys[index]

    def name(self, index: int) -> str:
        """Return what a person needs to find sample ``index``."""
        return f"{self._paths[self._file_of[index]]} key {self.key(index)!r:.80}"

    def image(self, index: int) -> UInt8[Tensor, "3 H W"]:
        """Return the picture of sample ``index`` on white; SampleError where it is unreadable."""
        try:
            return decode(self._read(index, 0, MAX_MEMBER_BYTES))
        except ValueError as error:
            raise SampleError(f"{self.name(index)}: {error}") from None

    def caption(self, index: int) -> str:
        """Return the prompt of sample ``index``; SampleError where it is not UTF-8."""
        try:
            return self._read(index, 1, MAX_CAPTION_BYTES).decode("utf-8")
        except UnicodeDecodeError:
            raise SampleError(f"{self.name(index)}: its caption is not UTF-8") from None

    def metadata(self, index: int) -> dict[str, Any]:
        """Return nothing: training sets have no timesteps."""
        return {}

    def _read(self, index: int, slot: int, most: int) -> bytes:
        offset, size = self._spans[index, slot].tolist()
        if not 0 <= size <= most:
            raise SampleError(f"{self.name(index)}: {size} bytes, at most {most} are read")
        content = bytearray(size)
        try:
            whole = fill(self._files.get(int(self._file_of[index])), [memoryview(content)], offset)
        except OSError as error:
            raise SampleError(f"{self.name(index)}: {error.strerror}") from None
        if not whole:
            raise SampleError(f"{self.name(index)}: cut off")
        return bytes(content)


def _places(path: Path) -> tuple[Array, list[str]]:
    """Return offset and size of picture and caption of each sample in the stream ``path``, and the keys."""
    found = read_batches(path, _check, _read_batch)
    table = np.concatenate([np.empty((0, 2, 2), np.int64), *(places for places, _ in found)])
    keys = [key for _, some in found for key in some]
    return table, [key or str(record) for record, key in enumerate(keys)]


def _read_batch(batch: Any, mapped: Any) -> tuple[Array, list[str]]:
    """Return offset and size of picture and caption, and the keys."""
    image, caption = batch[_image_column(batch.schema)], batch[_CAPTION]
    for column in (image, caption, *([batch[KEY]] if KEY in batch.schema.names else [])):
        column.validate(full=True)  # or Arrow would follow offsets out of the stream
    if pa.types.is_struct(image.type):
        image = image.flatten()[image.type.get_field_index("bytes")]
    return np.stack([spans(image, mapped), spans(caption, mapped)], axis=1), texts(batch, KEY)


def _image_column(schema: Any) -> str | None:
    return next((name for name in _IMAGE_COLUMNS if name in schema.names), None)


def _check(path: Path, schema: Any) -> None:
    """Raise DataError where ``schema`` has no pictures and captions."""
    name = _image_column(schema)
    if name is None or _CAPTION not in schema.names:
        there = ", ".join(map(str, schema.names))[:200]
        raise DataError(f"{path}: columns png and txt are needed; it has {there}")
    kind = schema.field(name).type
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind = kind.field("bytes").type
    if kind not in OFFSETS or schema.field(_CAPTION).type not in OFFSETS:
        raise DataError(
            f"{path}: column {name!r} is {schema.field(name).type}, not an image's bytes"
        )
