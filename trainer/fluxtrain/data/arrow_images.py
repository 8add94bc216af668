"""The cleaned CC12M as MLCommons publishes it: a folder of Arrow streams with images and captions.

Columns: ``png`` (or ``jpg``), Hugging Face's Image: a struct of ``bytes`` and ``path``; ``txt``, the caption;
``__key__``. A stream is memory-mapped once for the spans of its cells, which are then read without Arrow.
Axes: n samples.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fluxtrain.data.formats.arrow import (
    OFFSETS,
    cell_spans,
    check_small_columns,
    read_batches,
    stream_files,
    string_column,
    validate_columns,
)
from fluxtrain.data.formats.mlcommons import KEY
from fluxtrain.data.images import ImageFiles
from fluxtrain.errors import DataError
from fluxtrain.runtime.draws import Array

_IMAGE_COLUMNS, _CAPTION = ("png", "jpg"), "txt"


class ArrowImages(ImageFiles):
    """The images and captions of a folder that ``datasets.save_to_disk`` wrote; they have no metadata."""

    def __init__(self, folder: Path) -> None:
        """Open ``folder``; DataError, naming the file, if one is cut off or has other columns."""
        paths = stream_files(folder)
        files = [_read_file(path) for path in paths]
        super().__init__(paths, [keys for _, keys in files], [spans for spans, _ in files])
        if not len(self):
            raise DataError(f"{folder}: its files hold no samples")


def _read_file(path: Path) -> tuple[Array, list[str]]:
    """Return offset and size of image and caption of each sample in the stream ``path``, and the keys."""
    batches = read_batches(path, _check, _read_batch)
    spans = np.concatenate([np.empty((0, 4), np.int64), *(part for part, _ in batches)])
    keys = [key for _, part in batches for key in part]
    return spans, [key or str(record) for record, key in enumerate(keys)]


def _read_batch(batch: Any, mapped: Any) -> tuple[Array, list[str]]:
    image, caption = batch[_image_column(batch.schema)], batch[_CAPTION]
    validate_columns(batch, (str(_image_column(batch.schema)), _CAPTION, KEY))
    if pa.types.is_struct(image.type):
        image = image.flatten()[image.type.get_field_index("bytes")]
    spans = np.concatenate([cell_spans(image, mapped), cell_spans(caption, mapped)], axis=1)
    return spans, string_column(batch, KEY)


def _image_column(schema: Any) -> str | None:
    return next((name for name in _IMAGE_COLUMNS if name in schema.names), None)


def _check(path: Path, schema: Any) -> None:
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
    check_small_columns(path, schema)
