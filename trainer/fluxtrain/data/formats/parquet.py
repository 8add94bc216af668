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

from fluxtrain.data.formats.arrow import (
    OFFSETS,
    check_columns,
    schema_with,
    short_message,
    to_batch,
)
from fluxtrain.data.formats.mlcommons import (
    COLUMNS,
    KEY,
    MAX_CELL_BYTES,
    TIMESTEP,
    NpyHeader,
    copy_cell,
    read_header,
    shape_of,
    validate_timesteps,
)
from fluxtrain.data.formats.parquet_pages import CONTAINER_LIMIT, check_pages
from fluxtrain.data.shard_dataset import TEXT_FIELDS, FileDataset
from fluxtrain.data.shards import FIELDS, Sample, StreamWriter
from fluxtrain.errors import DataError
from fluxtrain.runtime.draws import Array

_DAMAGED = (pa.ArrowException, OSError, ValueError, StopIteration)
"""What reading a damaged file raises: Arrow's errors, UnicodeDecodeError, fewer rows than declared."""
_ROWS_AT_ONCE = 16
_BATCH_BYTES = 1 << 28
"""Of the rows that are decoded at once, where a dictionary has larger entries than usual."""


class ParquetDataset(FileDataset):
    """The samples of all parquet files in a folder, in the order of file names; reading in order is fast."""

    advice = (
        "parquet has no random access, so every sample decodes its row group from the start; "
        "`fluxtrain convert SOURCE TARGET --to shards` makes a set with random access"
    )

    def __init__(self, folder: Path) -> None:
        """Open ``folder``; DataError, naming the file, if one is cut off or has other columns."""
        paths = sorted(folder.glob("*.parquet"))
        rows_at_once = min(map(_rows_at_once, paths), default=_ROWS_AT_ONCE)
        self._groups = [group for path in paths for group in _groups(path)]
        super().__init__(folder, (rows for _, _, rows in self._groups))
        small = [_small_columns(path) for path in paths]
        self._keys = [key for keys, _ in small for key in keys]
        firsts = np.cumsum([0, *(len(keys) for keys, _ in small)]).tolist()
        self._steps = {
            path: (first, steps)
            for path, first, (_, steps) in zip(paths, firsts, small, strict=False)
        }
        self._cursor = _Cursor(rows_at_once)
        self._headers = self._first_headers()
        self.shape = shape_of(self.name(0), self._headers)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the open file, for another process."""
        return {**self.__dict__, "_cursor": self._cursor.anew()}

    @property
    def files(self) -> list[Path]:
        return list(dict.fromkeys(path for path, _, _ in self._groups))

    def key(self, index: int) -> str:
        return self._keys[index]

    def _read_timesteps(self, part: int) -> Array | None:
        path, _, rows = self._groups[part]
        first, steps = self._steps[path]
        begin = int(self._starts[part]) - first
        return None if steps is None else steps[begin : begin + rows]

    def _location(self, part: int, record: int) -> str:
        path, group, _ = self._groups[part]
        return f"{path} row group {group} row {record}"

    def _first_headers(self) -> list[NpyHeader]:
        part, record = self._place(0)
        try:
            cells = self._cursor.cells(*self._groups[part][:2], record)
            return [read_header(cell or b"") for cell in cells]
        except _DAMAGED as error:
            raise DataError(f"{self.name(0)}: {short_message(error)}") from None

    def _read_one(
        self, part: int, record: int, sample: tuple[memoryview, ...], skip_text: bool
    ) -> str | None:
        try:
            cells = self._cursor.cells(*self._groups[part][:2], record)
        except _DAMAGED as error:
            self._cursor = self._cursor.anew()
            return f"not readable ({short_message(error)})"
        for field, cell, view, expected in zip(FIELDS, cells, sample, self._headers, strict=True):
            if skip_text and field in TEXT_FIELDS:
                continue
            if fault := "missing" if cell is None else copy_cell(cell, expected, view):
                return f"{COLUMNS[field]}: {fault}"
        return None


class _Cursor:
    """A position in one row group; reading on is cheap, going back decodes the group again."""

    def __init__(self, rows_at_once: int) -> None:
        self._rows_at_once = rows_at_once
        self._at: tuple[Path, int] | None = None
        self._batches: Iterator[Any] = iter(())
        self._batch: Any = None
        self._first = 0  # the first row of the batch within its group

    def anew(self) -> _Cursor:
        """Return a cursor without a position."""
        return _Cursor(self._rows_at_once)

    def cells(self, path: Path, group: int, row: int) -> list[bytes | None]:
        """Return the cells of ``row`` in the order of FIELDS; None if one is null."""
        if self._at != (path, group) or row < self._first:
            self._at, self._first, self._batch = (path, group), 0, None
            # Decoded on demand: a row group may be larger than the memory.
            file = _opened(
                path, pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True
            )
            self._batches = file.iter_batches(
                self._rows_at_once,
                row_groups=[group],
                columns=list(COLUMNS.values()),
                use_threads=False,
            )
        while self._batch is None or row >= self._first + len(self._batch):
            self._first += len(self._batch) if self._batch is not None else 0
            self._batch = next(self._batches)
        values = [self._batch[name][row - self._first] for name in COLUMNS.values()]
        return [value.as_py() if value.is_valid else None for value in values]


def _opened(path: Path, **options: Any) -> Any:
    return pq.ParquetFile(path, thrift_container_size_limit=CONTAINER_LIMIT, **options)


def _rows_at_once(path: Path) -> int:
    """Return how many rows of ``path`` are decoded at once: each may be a copy of a dictionary's entry.

    Raises DataError if its pages are too large.
    """
    try:
        dictionaries = check_pages(path, {KEY, TIMESTEP, *COLUMNS.values()})
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a whole parquet file ({short_message(error)})") from None
    return min(_ROWS_AT_ONCE, max(1, _BATCH_BYTES // max(1, dictionaries)))


def _groups(path: Path) -> list[tuple[Path, int, int]]:
    """Return file, number and rows of each row group of ``path``; DataError if it is not whole."""
    try:
        file = _opened(path)
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
    schema = pq.read_schema(path)
    names = [name for name in (KEY, TIMESTEP) if name in schema.names]
    has_texts = KEY in names and schema.field(KEY).type in OFFSETS
    file = _opened(path, read_dictionary=[KEY] if has_texts else [])
    count = file.metadata.num_rows
    try:
        table = file.read(columns=names, use_threads=False)
        table.validate(full=True)
        keys = shared_values(table[KEY]) if KEY in names else [""] * count
        steps = table[TIMESTEP].to_pylist() if TIMESTEP in names else [None] * count
    except _DAMAGED as error:
        raise DataError(f"{path}: not readable ({short_message(error)})") from None
    return [str(key or "") for key in keys], validate_timesteps(path, steps)


def shared_values(column: Any) -> list[Any]:
    """Return the values of ``column``, which may be encoded as a dictionary; equal ones are one object."""
    values = list[Any]()
    for chunk in column.chunks:
        if not pa.types.is_dictionary(chunk.type):
            values += chunk.to_pylist()
            continue
        entries = chunk.dictionary.to_pylist()
        indices = chunk.indices.to_pylist()
        values += [None if index is None else entries[index] for index in indices]
    return values


class ParquetWriter(StreamWriter):
    """Writes parquet parts as the reference does: the same columns, one row group per batch."""

    batch_size = 256  # the reference's preprocessing batch

    def __init__(self, folder: Path, shard_size: int, timesteps: bool) -> None:
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
