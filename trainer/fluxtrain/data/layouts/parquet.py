"""MLCommons' preprocessed sets as parquet parts: what the reference writes before it merges them.

A parquet file has no random access: a sample is found by decoding its row group from the start. Reading
in order costs one pass; a random order costs a row group per sample, so convert first.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fluxtrain.data.dataset import Rows
from fluxtrain.data.layouts.arrow import brief, check_columns, schema_with, texts, to_batch
from fluxtrain.data.layouts.mlcommons import (
    COLUMNS,
    KEY,
    TIMESTEP,
    all_timesteps,
    checked_timesteps,
    chosen_timesteps,
    common_shape,
    copy_cell,
    named,
)
from fluxtrain.data.layouts.npy import MAX_CELL_BYTES, NpyHeader, read_header
from fluxtrain.data.shard_writer import Sample, row_bytes
from fluxtrain.data.shards import FIELDS
from fluxtrain.draws import Array
from fluxtrain.errors import DataError

_DAMAGED = (pa.ArrowException, OSError, ValueError, StopIteration)
"""What reading a damaged file raises: Arrow's own, a text that is no UTF-8, fewer rows than declared."""
_ROWS_AT_ONCE = 16
_ROWS_PER_GROUP = 256  # the reference's: one batch of its preprocessing


class ParquetDataset:
    """The samples of all parquet files in a folder, by file name; each reader keeps its place."""

    attribution = ""
    advice = (
        "parquet has no random access, so every sample decodes its row group from the start; "
        "`fluxtrain convert SOURCE TARGET --to shards` makes what is read at once"
    )

    def __init__(self, folder: Path) -> None:
        """Open ``folder``; DataError, naming the file, where one is cut off or not of these samples."""
        self.folder, self._paths = folder, sorted(folder.glob("*.parquet"))
        self._groups = [group for path in self._paths for group in _groups(path)]
        self._starts = np.cumsum([0, *(rows for _, _, rows in self._groups)])
        if not len(self):
            raise DataError(f"{folder}: its files hold no samples")
        small = [_small_columns(path) for path in self._paths]
        self._keys = [key for keys, _ in small for key in keys]
        self.stored_timesteps = all_timesteps([steps for _, steps in small])
        self._cursor = _Cursor()
        self._headers = self._first_headers()
        self.shape = common_shape(self.name(0), self._headers)

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(self._starts[-1])

    def __getstate__(self) -> dict[str, Any]:
        """Leave the open file behind when sent to another process."""
        return {**self.__dict__, "_cursor": _Cursor()}

    def read(self, indices: Array, rows: Rows, skip_text: Array) -> list[str | None]:
        """Fill ``rows`` with the samples at ``indices``; say per sample what is wrong, or None."""
        found: list[str | None] = [None] * len(indices)
        targets = [row_bytes(getattr(rows, field)) for field in FIELDS]
        for place in np.argsort(indices, kind="stable").tolist():  # one pass over each row group
            views = [target[place] for target in targets]
            found[place] = self._read_one(int(indices[place]), views, bool(skip_text[place]))
        return named(self.name, indices, found, rows.finite(skip_text))

    def timesteps(self, indices: Array) -> Array:
        """Return the stored evaluation timesteps (0 ... 7), by index where not all are stored."""
        return chosen_timesteps(self.stored_timesteps, indices)

    def caption(self, index: int) -> str:
        """Return nothing: this layout keeps no prompts."""
        return ""

    def key(self, index: int) -> str:
        """Return the name of sample ``index`` in the set it was made from."""
        return self._keys[index]

    def name(self, index: int) -> str:
        """Return what a person needs to find sample ``index``."""
        path, group, row = self._place(index)
        return f"{path} row group {group} row {row} (key {self.key(index)!r:.80})"

    def empty_text(self) -> None:
        """Return None: the empty prompt's encodings lie in files of their own."""

    def _place(self, index: int) -> tuple[Path, int, int]:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        path, group, _ = self._groups[number]
        return path, group, index - int(self._starts[number])

    def _first_headers(self) -> list[NpyHeader]:
        try:
            return [read_header(cell or b"") for cell in self._cursor.cells(*self._place(0))]
        except _DAMAGED as error:
            raise DataError(f"{self.name(0)}: {brief(error)}") from None

    def _read_one(self, index: int, views: list[memoryview], skip: bool) -> str | None:
        try:
            cells = self._cursor.cells(*self._place(index))
        except _DAMAGED as error:
            self._cursor = _Cursor()
            return f"not readable ({brief(error)})"
        for field, cell, view, usual in zip(FIELDS, cells, views, self._headers, strict=True):
            if skip and field in ("txt", "vec"):
                continue
            if fault := "missing" if cell is None else copy_cell(cell, usual, view):
                return f"{COLUMNS[field]}: {fault}"
        return None


class _Cursor:
    """A place in one row group; going on from it is cheap, going back decodes the group again."""

    def __init__(self) -> None:
        self._at: tuple[Path, int] | None = None
        self._batches: Iterator[Any] = iter(())
        self._batch: Any = None
        self._first = 0  # row of the group that the batch begins with

    def cells(self, path: Path, group: int, row: int) -> list[bytes | None]:
        """Return the cells of ``row`` in the order of FIELDS; None where one is null."""
        if self._at != (path, group) or row < self._first:
            self._at, self._first, self._batch = (path, group), 0, None
            # Decoded as it is asked for: a row group may be larger than the memory.
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
    """Return file, number and rows of each row group of ``path``; DataError where it is not whole."""
    try:
        file = pq.ParquetFile(path)
    except _DAMAGED as error:
        raise DataError(f"{path}: not a whole parquet file ({brief(error)})") from None
    check_columns(path, file.schema_arrow)
    groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
    for group in groups:
        # Of the whole group: to ask for a damaged column's own size ends the process (pyarrow 26).
        if group.num_rows and group.total_byte_size > MAX_CELL_BYTES * group.num_rows:
            raise DataError(f"{path}: its samples have more than {MAX_CELL_BYTES} bytes each")
    return [(path, number, group.num_rows) for number, group in enumerate(groups)]


def _small_columns(path: Path) -> tuple[list[str], Array | None]:
    """Return keys and timesteps of ``path``."""
    file = pq.ParquetFile(path)
    names = [name for name in (KEY, TIMESTEP) if name in file.schema_arrow.names]
    count = file.metadata.num_rows
    try:
        table = file.read(columns=names, use_threads=False)
        table.validate(full=True)
        keys = texts(table, KEY) if KEY in names else [""] * count
        steps = table[TIMESTEP].to_pylist() if TIMESTEP in names else [None] * count
    except _DAMAGED as error:
        raise DataError(f"{path}: not readable ({brief(error)})") from None
    return keys, checked_timesteps(path, steps)


class ParquetWriter:
    """Writes parquet parts as the reference does: the same columns, a row group per batch."""

    def __init__(self, folder: Path, shard_size: int, timesteps: bool) -> None:
        """Write parts of ``shard_size`` samples; each appears whole or not at all."""
        self.folder, self._shard_size, self._schema = folder, shard_size, schema_with(timesteps)
        self._waiting, self._in_file, self._number = list[Sample](), 0, 0
        self._file: Any = None

    def __enter__(self) -> ParquetWriter:
        """Return the writer."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Write what waits, unless something went wrong."""
        if kind is None:
            self._finish_file()
        elif self._file is not None:
            self._file.close()

    def add(self, sample: Sample) -> None:
        """Append ``sample``."""
        self._waiting.append(sample)
        self._in_file += 1
        if len(self._waiting) == _ROWS_PER_GROUP:
            self._flush()
        if self._in_file == self._shard_size:
            self._finish_file()

    def _flush(self) -> None:
        if self._waiting:
            if self._file is None:
                self._file = pq.ParquetWriter(
                    str(self._partial), self._schema, write_page_checksum=True
                )
            self._file.write_batch(to_batch(self._waiting, self._schema))
            self._waiting = []

    @property
    def _partial(self) -> Path:
        return self.folder / f"data_0_{self._number:04d}.partial"

    def _finish_file(self) -> None:
        self._flush()
        if self._file is not None:
            self._file.close()
            self._partial.replace(self._partial.with_suffix(".parquet"))
            self._number += 1
        self._file, self._in_file = None, 0
