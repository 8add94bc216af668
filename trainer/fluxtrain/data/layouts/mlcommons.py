"""The preprocessed samples of MLCommons, whatever file holds them: a .npy file per encoding.

Axes: n samples, f fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int64

from fluxtrain.data.dataset import Rows, SampleShape
from fluxtrain.data.layouts.npy import MAX_CELL_BYTES, NpyHeader, read_header
from fluxtrain.data.open_files import OpenFiles, fill
from fluxtrain.data.shard_writer import row_bytes
from fluxtrain.data.shards import FIELDS, NUM_TIMESTEPS
from fluxtrain.draws import Array
from fluxtrain.errors import DataError

COLUMNS = {"txt": "t5_encodings", "vec": "clip_encodings", "mean": "mean", "logvar": "logvar"}
KEY, TIMESTEP = "__key__", "timestep"
_TEXT = ("txt", "vec")
_HEADER_BYTES = 4096


class Notes(Protocol):
    """What a file says of its samples beside the encodings; read when it is asked for."""

    def key(self, record: int) -> str:
        """Return the name of ``record`` in the set it was made from, empty where it has none."""
        ...

    def timesteps(self) -> Array | None:
        """Return the evaluation timesteps (0 ... 7), None where not all are stored."""
        ...


@dataclass(frozen=True)
class KnownNotes:
    """Notes that were read with the rest."""

    keys: list[str]
    steps: Array | None

    def key(self, record: int) -> str:
        """Return the name of ``record``."""
        return self.keys[record]

    def timesteps(self) -> Array | None:
        """Return the timesteps."""
        return self.steps


@dataclass(frozen=True)
class Cells:
    """Where the samples of one file lie; a cell is a .npy file, and one of size 0 is missing."""

    path: Path
    offsets: Int64[np.ndarray[Any, Any], "n f"]
    sizes: Int64[np.ndarray[Any, Any], "n f"]
    notes: Notes

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.offsets)


class NpyDataset:
    """Samples whose encodings are .npy files inside larger ones, read straight into the batch."""

    attribution = ""

    def __init__(self, folder: Path, files: list[Cells]) -> None:
        """Take the samples of ``files``; DataError where the first one's shapes are none of encodings."""
        self.folder, self._cells = folder, [cells for cells in files if len(cells)]
        if not self._cells:
            raise DataError(f"{folder}: its files hold no samples")
        self._starts = np.cumsum([0, *(len(cells) for cells in self._cells)])
        self._files = OpenFiles([cells.path for cells in self._cells])
        self._headers = [self._first_header(field) for field in range(len(FIELDS))]
        self.shape = common_shape(self.name(0), self._headers)

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(self._starts[-1])

    def read(self, indices: Array, rows: Rows, skip_text: Array) -> list[str | None]:
        """Fill ``rows`` with the samples at ``indices``; say per sample what is wrong, or None."""
        views = zip(*(row_bytes(getattr(rows, field)) for field in FIELDS), strict=True)
        found = [
            self._read_one(*place, sample, skip)
            for place, sample, skip in zip(
                self._places(indices), views, skip_text.tolist(), strict=True
            )
        ]
        return named(self.name, indices, found, rows.finite(skip_text))

    @cached_property
    def stored_timesteps(self) -> Array | None:
        """Return the evaluation timestep (0 ... 7) of every sample, None where not all have one."""
        return all_timesteps([cells.notes.timesteps() for cells in self._cells])

    def timesteps(self, indices: Array) -> Array:
        """Return the stored evaluation timesteps, by index where not all are stored."""
        return chosen_timesteps(self.stored_timesteps, indices)

    def caption(self, index: int) -> str:
        """Return nothing: these layouts keep no prompts."""
        return ""

    def key(self, index: int) -> str:
        """Return the name of sample ``index`` in the set it was made from."""
        number, record = next(self._places(np.array([index])))
        return self._cells[number].notes.key(record)

    def name(self, index: int) -> str:
        """Return what a person needs to find sample ``index``."""
        number, record = next(self._places(np.array([index])))
        return f"{self._cells[number].path} record {record} (key {self.key(index)!r:.80})"

    def empty_text(self) -> None:
        """Return None: the empty prompt's encodings lie in files of their own."""

    def _places(self, indices: Array) -> Iterator[tuple[int, int]]:
        numbers = np.searchsorted(self._starts, indices, side="right") - 1
        records = indices - self._starts[numbers]
        return zip(numbers.tolist(), records.tolist(), strict=True)

    def _first_header(self, field: int) -> NpyHeader:
        """Return the header of the first cell of ``field`` that is there; all others must equal it."""
        for number, cells in enumerate(self._cells):
            for record in np.flatnonzero(cells.sizes[:, field])[:1].tolist():
                size = min(int(cells.sizes[record, field]), _HEADER_BYTES)
                content = bytearray(size)
                try:
                    fill(
                        self._files.get(number),
                        [memoryview(content)],
                        int(cells.offsets[record, field]),
                    )
                    return read_header(bytes(content))
                except (OSError, ValueError) as error:
                    column = COLUMNS[FIELDS[field]]
                    raise DataError(f"{cells.path} record {record}: {column}: {error}") from None
        raise DataError(f"{self.folder}: no sample has {COLUMNS[FIELDS[field]]}")

    def _read_one(
        self, number: int, record: int, sample: tuple[memoryview, ...], skip: bool
    ) -> str | None:
        """Fill the views of ``sample`` with ``record`` of file ``number``; return what is wrong with it."""
        cells = self._cells[number]
        try:
            file = self._files.get(number)
            for field, view in enumerate(sample):
                if skip and FIELDS[field] in _TEXT:
                    continue
                offset, size = int(cells.offsets[record, field]), int(cells.sizes[record, field])
                if fault := self._read_cell(file, offset, size, self._headers[field], view):
                    return f"{COLUMNS[FIELDS[field]]}: {fault}"
        except OSError as error:
            return error.strerror or "not readable"
        return None

    def _read_cell(
        self, file: int, offset: int, size: int, usual: NpyHeader, view: memoryview
    ) -> str | None:
        if size != usual.file_bytes:
            return _other_cell(file, offset, size, usual, view)
        header = bytearray(len(usual.content))
        if not fill(file, [memoryview(header), view], offset):
            return "cut off"
        return None if header == usual.content else _other_cell(file, offset, size, usual, view)


def _other_cell(
    file: int, offset: int, size: int, usual: NpyHeader, view: memoryview
) -> str | None:
    """Fill ``view`` with a cell whose header is written in another way; return what is wrong with it."""
    if not size:
        return "missing"
    if size > MAX_CELL_BYTES:
        return f"{size} bytes, at most {MAX_CELL_BYTES} are read"
    content = bytearray(size)
    if not fill(file, [memoryview(content)], offset):
        return "cut off"
    return copy_cell(bytes(content), usual, view)


def copy_cell(content: bytes, usual: NpyHeader, view: memoryview) -> str | None:
    """Copy the numbers of the .npy file ``content`` to ``view``; return what is wrong with it, or None."""
    try:
        header = read_header(content)
    except ValueError as error:
        return str(error)
    if (header.shape, header.dtype) != (usual.shape, usual.dtype):
        return f"{header.dtype} {list(header.shape)}, the others {usual.dtype} {list(usual.shape)}"
    if len(content) != header.file_bytes:
        return f"{len(content)} bytes, its header says {header.file_bytes}"
    view[:] = content[len(header.content) :]
    return None


def named(
    name: Callable[[int], str], indices: Array, found: list[str | None], finite: list[bool]
) -> list[str | None]:
    """Return the faults of a batch with the names of their samples; not being finite is one too."""
    faults = [
        fault or (None if ok else "not finite") for fault, ok in zip(found, finite, strict=True)
    ]
    return [
        f"{name(int(index))}: {fault}" if fault else None
        for fault, index in zip(faults, indices, strict=True)
    ]


def common_shape(name: str, headers: list[NpyHeader]) -> SampleShape:
    """Return the shape that ``headers``, in the order of FIELDS, stand for; DataError where it is none."""
    txt, vec, latent, logvar = (header.shape for header in headers)
    dtypes = {header.dtype for header in headers}
    ranks = (len(txt), len(vec), len(latent))
    if (
        ranks != (2, 1, 3)
        or latent != logvar
        or len(dtypes) != 1
        or not math.prod(txt + vec + latent)
    ):
        shapes = ", ".join(str(list(header.shape)) for header in headers)
        raise DataError(f"{name}: its shapes {shapes} are not those of an encoded sample")
    return SampleShape((txt[0], txt[1]), vec[0], (latent[0], latent[1], latent[2]), dtypes.pop())


def chosen_timesteps(stored: Array | None, indices: Array) -> Array:
    """Return the timesteps at ``indices``: those ``stored``, or in turn where there are none."""
    chosen: Array = indices % NUM_TIMESTEPS if stored is None else stored[indices]
    return chosen


def all_timesteps(parts: list[Array | None]) -> Array | None:
    """Return the timesteps of all files, None where one has none."""
    known = [part for part in parts if part is not None]
    return np.concatenate(known) if len(known) == len(parts) else None


def checked_timesteps(path: Path, values: Iterable[Any]) -> Array | None:
    """Return ``values`` as timesteps, None where one is null or absent; DataError where one is none."""
    known = list[int]()
    for value in values:
        if value is None:
            return None  # the rest need not be read
        if type(value) is not int or not 0 <= value < NUM_TIMESTEPS:
            raise DataError(f"{path}: a timestep is not one of 0 to {NUM_TIMESTEPS - 1}")
        known.append(value)
    return np.array(known, dtype=np.int64)
