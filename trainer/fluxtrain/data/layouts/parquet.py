"""MLCommons' preprocessed sets as parquet parts: what the reference writes before it merges them.

A parquet file has no random access: reading a sample decodes its row group from the start. Reading in order
takes one pass; a random order decodes a row group per sample, so such sets should be converted first.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fluxtrain.data.dataset import Encodings, concatenate_timesteps, name_faults, timesteps_at
from fluxtrain.data.layouts.arrow import (
    check_columns,
    schema_with,
    short_message,
    string_column,
    to_batch,
)
from fluxtrain.data.layouts.mlcommons import (
    COLUMNS,
    KEY,
    TIMESTEP,
    copy_cell,
    shape_of,
    validate_timesteps,
)
from fluxtrain.data.layouts.npy import MAX_CELL_BYTES, NpyHeader, read_header
from fluxtrain.data.sample_writer import Sample, StreamWriter
from fluxtrain.data.shard_writer import sample_views
from fluxtrain.data.shards import FIELDS
from fluxtrain.draws import Array
from fluxtrain.errors import DataError

_DAMAGED = (pa.ArrowException, OSError, ValueError, StopIteration)
"""What reading a damaged file raises: Arrow's errors, UnicodeDecodeError, fewer rows than declared."""
_ROWS_AT_ONCE = 16


class ParquetDataset:
    """The samples of all parquet files in a folder, in the order of file names; reading in order is fast."""

    attribution = ""
    advice = (
        "parquet has no random access, so every sample decodes its row group from the start; "
        "`fluxtrain convert SOURCE TARGET --to shards` makes a set with random access"
    )

    def __init__(self, folder: Path) -> None:
        """Open ``folder``; DataError, naming the file, if one is cut off or has other columns."""
        self.folder, self._paths = folder, sorted(folder.glob("*.parquet"))
        self._groups = [group for path in self._paths for group in _groups(path)]
        self._starts = np.cumsum([0, *(rows for _, _, rows in self._groups)])
        if not len(self):
            raise DataError(f"{folder}: its files hold no samples")
        small = [_small_columns(path) for path in self._paths]
        self._keys = [key for keys, _ in small for key in keys]
        self.stored_timesteps = concatenate_timesteps([steps for _, steps in small])
        self._cursor = _Cursor()
        self._headers = self._first_headers()
        self.shape = shape_of(self.name(0), self._headers)

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(self._starts[-1])

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the open file, for another process."""
        return {**self.__dict__, "_cursor": _Cursor()}

    def read(self, indices: Array, out: Encodings, skip_text: Array) -> list[str | None]:
        """Fill ``out`` with the samples at ``indices`` and return a fault message, or None, per sample."""
        faults: list[str | None] = [None] * len(indices)
        targets = [sample_views(getattr(out, field)) for field in FIELDS]
        for place in np.argsort(indices, kind="stable").tolist():  # one pass over each row group
            views = [target[place] for target in targets]
            faults[place] = self._read_one(int(indices[place]), views, bool(skip_text[place]))
        return name_faults(self.name, indices, faults, out.finite(skip_text))

    def timesteps(self, indices: Array) -> Array:
        """Return the stored evaluation timesteps (0 ... 7), index modulo 8 if not all are stored."""
        return timesteps_at(self.stored_timesteps, indices)

    def caption(self, index: int) -> str:
        """Return "": this layout stores no prompts."""
        return ""

    def key(self, index: int) -> str:
        """Return the key of sample ``index`` in its source data set."""
        return self._keys[index]

    def name(self, index: int) -> str:
        """Return the file, row group, row and key of sample ``index``, for messages."""
        path, group, row = self._place(index)
        return f"{path} row group {group} row {row} (key {self.key(index)!r:.80})"

    def empty_text(self) -> None:
        """Return None: the empty prompt's encodings are in files of their own."""

    def _place(self, index: int) -> tuple[Path, int, int]:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        path, group, _ = self._groups[number]
        return path, group, index - int(self._starts[number])

    def _first_headers(self) -> list[NpyHeader]:
        try:
            return [read_header(cell or b"") for cell in self._cursor.cells(*self._place(0))]
        except _DAMAGED as error:
            raise DataError(f"{self.name(0)}: {short_message(error)}") from None

    def _read_one(self, index: int, views: list[memoryview], skip: bool) -> str | None:
        try:
            cells = self._cursor.cells(*self._place(index))
        except _DAMAGED as error:
            self._cursor = _Cursor()
            return f"not readable ({short_message(error)})"
        for field, cell, view, expected in zip(FIELDS, cells, views, self._headers, strict=True):
            if skip and field in ("txt", "vec"):
                continue
            if fault := "missing" if cell is None else copy_cell(cell, expected, view):
                return f"{COLUMNS[field]}: {fault}"
        return None


class _Cursor:
    """A position in one row group; reading on is cheap, going back decodes the group again."""

    def __init__(self) -> None:
        self._at: tuple[Path, int] | None = None
        self._batches: Iterator[Any] = iter(())
        self._batch: Any = None
        self._first = 0  # the first row of the batch within its group

    def cells(self, path: Path, group: int, row: int) -> list[bytes | None]:
        """Return the cells of ``row`` in the order of FIELDS; None if one is null."""
        if self._at != (path, group) or row < self._first:
            self._at, self._first, self._batch = (path, group), 0, None
            # Decoded on demand: a row group may be larger than the memory.
            file = pq.ParquetFile(
                path, pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True
            )
            self._batches = file.iter_batches(
                _ROWS_AT_ONCE, row_groups=[group], columns=list(COLUMNS.values()), use_threads=False
            )
        while self._batch is None or row >= self._first + len(self._batch):
            self._first += len(self._batch) if self._batch is not None else 0
            self._batch = next(self._batches)
        values = [self._batch[name][row - self._first] for name in COLUMNS.values()]
        return [value.as_py() if value.is_valid else None for value in values]


def _groups(path: Path) -> list[tuple[Path, int, int]]:
    """Return file, number and rows of each row group of ``path``; DataError if it is not whole."""
    try:
        file = pq.ParquetFile(path)
    except _DAMAGED as error:
        raise DataError(f"{path}: not a whole parquet file ({short_message(error)})") from None
    check_columns(path, file.schema_arrow)
    groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
    for group in groups:
        # The whole group's size: reading a damaged column's own size aborts the process (pyarrow 26).
        if group.num_rows and group.total_byte_size > MAX_CELL_BYTES * group.num_rows:
            raise DataError(f"{path}: its samples have more than {MAX_CELL_BYTES} bytes each")
    return [(path, number, group.num_rows) for number, group in enumerate(groups)]


def _small_columns(path: Path) -> tuple[list[str], Array | None]:
    """Return the keys and timesteps of ``path``."""
    file = pq.ParquetFile(path)
    names = [name for name in (KEY, TIMESTEP) if name in file.schema_arrow.names]
    count = file.metadata.num_rows
    try:
        table = file.read(columns=names, use_threads=False)
        table.validate(full=True)
        keys = string_column(table, KEY) if KEY in names else [""] * count
        steps = table[TIMESTEP].to_pylist() if TIMESTEP in names else [None] * count
    except _DAMAGED as error:
        raise DataError(f"{path}: not readable ({short_message(error)})") from None
    return keys, validate_timesteps(path, steps)


class ParquetWriter(StreamWriter):
    """Writes parquet parts as the reference does: the same columns, one row group per batch."""

    batch_size = 256  # the reference's preprocessing batch

    def __init__(self, folder: Path, shard_size: int, timesteps: bool) -> None:
        """Write parts of ``shard_size`` samples."""
        super().__init__(folder, shard_size)
        self._schema = schema_with(timesteps)

    def _file_name(self, number: int) -> str:
        return f"data_0_{number:04d}.parquet"

    def _open(self, path: Path) -> Any:
        return pq.ParquetWriter(str(path), self._schema, write_page_checksum=True)

    def _write(self, file: Any, samples: list[Sample]) -> None:
        file.write_batch(to_batch(samples, self._schema))

    def _write_listing(self) -> None:
        """Write nothing: the parts have no listing."""
