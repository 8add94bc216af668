"""MLCommons' preprocessed samples in any container: every encoding is a .npy file inside a larger file.

Axes: n samples, f fields.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from fluxtrain.data.dataset import SampleShape, sample_shape
from fluxtrain.data.shard_dataset import TEXT_FIELDS, FileDataset
from fluxtrain.data.shards import FIELDS
from fluxtrain.errors import DataError
from fluxtrain.runtime.draws import NUM_TIMESTEPS, Array
from fluxtrain.runtime.files import OpenFiles, read_into

COLUMNS = {"txt": "t5_encodings", "vec": "clip_encodings", "mean": "mean", "logvar": "logvar"}
KEY, TIMESTEP = "__key__", "timestep"
_HEADER_BYTES = 4096


@dataclass(frozen=True)
class SampleMetadata:
    """The keys and timesteps of the samples of one file."""

    keys: list[str]
    """In its source data set, "" if it has none."""
    steps: Array | None
    """The evaluation timesteps (0 ... 7), None if not all are stored."""

    def key(self, record: int) -> str:
        return self.keys[record]

    def timesteps(self) -> Array | None:
        return self.steps


@dataclass(frozen=True)
class CellTable:
    """The spans of the cells of one file; a cell is a .npy file, and one of size 0 is missing."""

    path: Path
    offsets: Int64[np.ndarray[Any, Any], "n f"]
    sizes: Int64[np.ndarray[Any, Any], "n f"]
    metadata: SampleMetadata

    def span(self, record: int, field: int) -> tuple[int, int]:
        """Return offset and size of one cell."""
        return int(self.offsets[record, field]), int(self.sizes[record, field])


class NpyDataset(FileDataset):
    """Samples whose encodings are .npy files inside larger files, read straight into the batch."""

    def __init__(self, folder: Path, tables: list[CellTable]) -> None:
        """Open the files of ``tables``; DataError if the first sample's shapes are not those of encodings."""
        super().__init__(folder, (len(table.offsets) for table in tables))
        self._tables = tables
        self._files = OpenFiles([table.path for table in tables])
        self._headers = [self._first_header(field) for field in range(len(FIELDS))]
        self.shape = shape_of(self.name(0), self._headers)

    @property
    def files(self) -> list[Path]:
        return [table.path for table in self._tables]

    def key(self, index: int) -> str:
        number, record = self._place(index)
        return self._tables[number].metadata.key(record)

    def _read_timesteps(self, part: int) -> Array | None:
        return self._tables[part].metadata.timesteps()

    def _location(self, part: int, record: int) -> str:
        return f"{self._tables[part].path} record {record}"

    def _first_header(self, field: int) -> NpyHeader:
        """Return the header of the first cell of ``field``; all others must have its shape and dtype."""
        for number, table in enumerate(self._tables):
            for record in np.flatnonzero(table.sizes[:, field])[:1].tolist():
                offset, size = table.span(record, field)
                content = bytearray(min(size, _HEADER_BYTES))
                try:
                    read_into(self._files.get(number), [memoryview(content)], offset)
                    header = read_header(bytes(content))
                    if header.file_bytes != size:  # a batch has as many bytes as it claims
                        raise ValueError(f"{size} bytes, its header gives {header.file_bytes}")
                    return header
                except (OSError, ValueError) as error:
                    column = COLUMNS[FIELDS[field]]
                    raise DataError(f"{table.path} record {record}: {column}: {error}") from None
        raise DataError(f"{self.folder}: no sample has {COLUMNS[FIELDS[field]]}")

    def _read_one(
        self, part: int, record: int, sample: tuple[memoryview, ...], skip_text: bool
    ) -> str | None:
        try:
            file = self._files.get(part)
            for field, view in enumerate(sample):
                if skip_text and FIELDS[field] in TEXT_FIELDS:
                    continue
                span = self._tables[part].span(record, field)
                if fault := _read_cell(file, *span, self._headers[field], view):
                    return f"{COLUMNS[FIELDS[field]]}: {fault}"
        except OSError as error:
            return error.strerror or "not readable"
        return None


def _read_cell(
    file: int, offset: int, size: int, expected: NpyHeader, view: memoryview
) -> str | None:
    """Fill ``view`` with the numbers of a cell; return a fault message or None."""
    if size == expected.file_bytes:
        header = bytearray(len(expected.content))
        if not read_into(file, [memoryview(header), view], offset):
            return "cut off"
        if header == expected.content:
            return None
    if not size:
        return "missing"
    if size > MAX_CELL_BYTES:
        return f"{size} bytes, at most {MAX_CELL_BYTES} are read"
    content = bytearray(size)  # an equal header may be spelled differently
    if not read_into(file, [memoryview(content)], offset):
        return "cut off"
    return copy_cell(bytes(content), expected, view)


def copy_cell(content: bytes, expected: NpyHeader, view: memoryview) -> str | None:
    """Copy the numbers of the .npy file ``content`` to ``view``; return a fault message or None."""
    try:
        header = read_header(content)
    except ValueError as error:
        return str(error)
    if (header.shape, header.dtype) != (expected.shape, expected.dtype):
        return f"{header.dtype} {list(header.shape)}, the others {expected.dtype} {list(expected.shape)}"
    if len(content) != header.file_bytes:
        return f"{len(content)} bytes, its header gives {header.file_bytes}"
    view[:] = content[len(header.content) :]
    return None


def shape_of(name: str, headers: list[NpyHeader]) -> SampleShape:
    """Return the shape of a sample with ``headers``, in the order of FIELDS; DataError if it is invalid."""
    shapes = [header.shape for header in headers]
    shape = sample_shape(shapes, [header.dtype for header in headers])
    if shape is None or not all(math.prod(each) for each in shapes):
        listed = ", ".join(str(list(each)) for each in shapes)
        raise DataError(f"{name}: its shapes {listed} are not those of an encoded sample")
    return shape


def validate_timesteps(path: Path, values: Iterable[Any]) -> Array | None:
    """Return ``values`` as timesteps, None if one is null or absent; DataError if one is invalid."""
    timesteps = list[int]()
    for value in values:
        if value is None:
            return None  # the others need not be read
        if type(value) is not int or not 0 <= value < NUM_TIMESTEPS:
            raise DataError(f"{path}: a timestep is not one of 0 to {NUM_TIMESTEPS - 1}")
        timesteps.append(value)
    return np.array(timesteps, dtype=np.int64)


MAX_CELL_BYTES = 1 << 28
"""Maximum size of one encoding; the benchmark's T5 encodings have 2 MiB."""
_MAX_HEADER_BYTES = 4096
_DTYPES = {"<u2": torch.bfloat16, "<f2": torch.float16, "<f4": torch.float32}


@dataclass(frozen=True)
class NpyHeader:
    """The parsed header of one file; ``content`` is its bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    content: bytes

    @property
    def file_bytes(self) -> int:
        """Return the size of the whole file."""
        return len(self.content) + math.prod(self.shape) * self.dtype.itemsize


def read_header(content: bytes) -> NpyHeader:
    """Return the header at the start of ``content``; ValueError, with the reason, if it is not supported.

    uint16 means bfloat16, which NumPy lacks.
    """
    stream = io.BytesIO(content[:_MAX_HEADER_BYTES])
    shape, fortran_order, dtype = _parse(stream)
    if dtype.str not in _DTYPES:
        raise ValueError(
            f"its numbers are of type {dtype.str[:40]}, not uint16, float16 or float32"
        )
    if fortran_order and len(shape) > 1:
        raise ValueError("its numbers are in Fortran order")
    header = NpyHeader(shape, _DTYPES[dtype.str], content[: stream.tell()])
    if min(shape, default=1) < 0 or header.file_bytes > MAX_CELL_BYTES:
        raise ValueError(f"its shape {list(shape)} is larger than {MAX_CELL_BYTES} bytes")
    return header


def _parse(stream: io.BytesIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return NumPy's parse of the header; its parser accepts literals only and runs no code."""
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    try:
        version = np.lib.format.read_magic(stream)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # NumPy only warns of Python 2's headers
            return readers[version](stream, max_header_size=_MAX_HEADER_BYTES)
    except Exception as error:  # the parser of literals may raise anything on malformed bytes
        raise ValueError(f"not a .npy file ({type(error).__name__})") from None


def to_tensor(content: bytes) -> Tensor:
    """Return the numbers of a whole file; ValueError, with the reason, if it is not supported."""
    header = read_header(content)
    if len(content) != header.file_bytes:
        raise ValueError(f"{len(content)} bytes, its header gives {header.file_bytes}")
    numbers = bytearray(content[len(header.content) :])
    flat = torch.frombuffer(numbers, dtype=header.dtype) if numbers else torch.empty(0)
    return flat.to(header.dtype).view(header.shape)


def to_bytes(values: Tensor) -> bytes:
    """Return ``values`` as a .npy file; bfloat16 is written as uint16, as in the reference."""
    plain = values.contiguous()
    array = (plain.view(torch.uint16) if plain.dtype == torch.bfloat16 else plain).numpy()
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, version=(1, 0), allow_pickle=False)
    return stream.getvalue()
