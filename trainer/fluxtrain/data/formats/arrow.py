"""MLCommons' preprocessed sets as Hugging Face saves them: a folder of Arrow streams, read at random.

    folder/
      data-00000-of-00002.arrow   columns __key__, t5_encodings, clip_encodings, mean, logvar, timestep
      state.json                  lists the files
      dataset_info.json           the columns' types

A stream is memory-mapped once to compute the spans of its cells; samples are then read without Arrow.
Axes: n samples, f fields.

Arrow itself decompresses a batch as it is read, to whatever size the batch claims, so compressed ones
are refused.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from fluxtrain.data.formats.mlcommons import (
    COLUMNS,
    KEY,
    TIMESTEP,
    CellTable,
    NpyDataset,
    SampleMetadata,
    to_bytes,
    validate_timesteps,
)
from fluxtrain.data.shards import Sample, StreamWriter
from fluxtrain.errors import DataError
from fluxtrain.runtime.draws import Array
from fluxtrain.runtime.files import atomic_write

Read = TypeVar("Read")
STATE = "state.json"
_MAX_STATE_BYTES = 1 << 24
OFFSETS = {
    pa.binary(): np.int32,
    pa.string(): np.int32,
    pa.large_binary(): np.int64,
    pa.large_string(): np.int64,
}
"""The binary types, and the type of their offsets."""


def open_arrow(folder: Path) -> NpyDataset:
    """Return the samples of ``folder``; DataError, naming the file, if one is cut off or not a stream."""
    return NpyDataset(folder, [_cells(path) for path in stream_files(folder)])


def stream_files(folder: Path) -> list[Path]:
    """Return the streams in the order of state.json, all streams by name if there is none."""
    state = folder / STATE
    if not state.exists():
        return sorted(folder.glob("*.arrow"))
    try:
        if state.stat().st_size > _MAX_STATE_BYTES:
            raise ValueError(f"more than {_MAX_STATE_BYTES} bytes")
        names = [entry["filename"] for entry in json.loads(state.read_bytes())["_data_files"]]
        outside = [name for name in names if Path(name).name != name or name in ("", "..")]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{state}: not the state of a saved data set ({error!r:.200})") from None
    if outside or not names:
        listed = f"{outside[0]!r:.80}, which is outside the folder" if outside else "no files"
        raise DataError(f"{state}: it lists {listed}")
    return [folder / name for name in names]


def read_batches(
    path: Path, check: Callable[[Path, Any], None], read: Callable[[Any, Any], Read]
) -> list[Read]:
    """Return ``read(batch, mapped_file)`` for each record batch of the stream ``path``.

    ``check`` validates the schema. Raises DataError if the stream is cut off or not one, or if ``read``
    raises ValueError for a damaged batch.
    """
    try:
        with pa.memory_map(str(path)) as file:
            mapped = file.read_buffer()
            for message in pa.ipc.MessageReader.open_stream(mapped):
                if message.type not in ("record batch", "dictionary"):
                    continue
                try:
                    if _is_compressed(memoryview(message.metadata), message.type == "dictionary"):
                        raise ValueError(
                            "its cells are compressed; save it with datasets' save_to_disk"
                        )
                except struct.error:
                    raise ValueError("a message is malformed") from None
            stream = pa.ipc.open_stream(mapped)
            check(path, stream.schema)
            return [read(batch, mapped) for batch in stream]
    except FileNotFoundError:
        raise DataError(f"{path}: missing") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path}: not a whole Arrow stream ({short_message(error)})") from None


def _cells(path: Path) -> CellTable:
    """Return the cells of the stream ``path``; of the encodings only offsets are read."""
    batches = read_batches(path, check_columns, _read_batch)
    cells = np.concatenate(
        [np.empty((0, len(COLUMNS), 2), np.int64), *(spans for spans, _, _ in batches)]
    )
    keys = [key for _, part, _ in batches for key in part]
    steps = validate_timesteps(path, (step for _, _, part in batches for step in part))
    return CellTable(path, cells[:, :, 0], cells[:, :, 1], SampleMetadata(keys, steps))


def _read_batch(batch: Any, mapped: Any) -> tuple[Array, list[str], list[Any]]:
    names = batch.schema.names
    validate_columns(batch, (KEY, TIMESTEP, *COLUMNS.values()))
    steps = batch[TIMESTEP].to_pylist() if TIMESTEP in names else [None] * len(batch)
    cells = np.stack([cell_spans(batch[name], mapped) for name in COLUMNS.values()], axis=1)
    return cells, string_column(batch, KEY), steps


def validate_columns(batch: Any, names: Iterable[str]) -> None:
    """Raise ValueError or Arrow's error if a column in ``names``, which ``batch`` may lack, is malformed."""
    for name in names:
        if name in batch.schema.names:
            batch[name].validate(full=True)  # Arrow itself follows offsets out of the stream
            if len(batch[name]) != batch.num_rows:
                raise ValueError(f"column {name!r} has {len(batch[name])} of {batch.num_rows} rows")


def cell_spans(column: Any, mapped: Any) -> Array:
    """Return offset in the file and size of each cell of ``column``; size 0 if it is null."""
    _, offsets, values = column.buffers()
    count = len(column) + column.offset
    offsets = np.frombuffer(offsets, OFFSETS[column.type], count + 1)[column.offset :]
    offsets = offsets.astype(np.int64)
    start = values.address - mapped.address if values is not None else 0
    if values is not None and not 0 <= start <= mapped.size - values.size:
        raise ValueError("its cells are compressed; save it with datasets' save_to_disk")
    sizes = np.diff(offsets)
    if column.null_count:
        sizes[column.is_null().to_numpy(zero_copy_only=False)] = 0
    return np.stack([start + offsets[:-1], sizes], axis=1)


def string_column(batch: Any, name: str) -> list[str]:
    """Return the column ``name`` as strings, "" for null; all "" if there is no such column."""
    if name not in batch.schema.names:
        return [""] * batch.num_rows
    return [str(value or "") for value in batch[name].to_pylist()]


def short_message(error: Exception) -> str:
    """Return the start of an error's message, its type's name if the message is not printable."""
    message = " ".join(str(error).split())[:200]
    return message if message and message.isprintable() else type(error).__name__


def check_columns(path: Path, schema: Any) -> None:
    """Raise DataError if ``schema`` lacks a column of preprocessed samples."""
    for name in COLUMNS.values():
        if name not in schema.names:
            existing = ", ".join(map(str, schema.names))[:200]
            raise DataError(f"{path}: column {name!r} is missing; it has {existing}")
        if schema.field(name).type not in OFFSETS:
            raise DataError(f"{path}: column {name!r} is {schema.field(name).type}, not binary")
    check_small_columns(path, schema)


def check_small_columns(path: Path, schema: Any) -> None:
    """Raise DataError if keys or timesteps are of a type whose values could be long and shared by rows."""
    for name in (KEY, TIMESTEP):
        if name not in schema.names:
            continue
        kind = schema.field(name).type
        allowed = pa.types.is_integer(kind) or pa.types.is_null(kind)
        if not allowed and not (name == KEY and kind in OFFSETS):
            raise DataError(f"{path}: column {name!r} is {str(kind)[:80]}")


SCHEMA = pa.schema([(KEY, pa.string()), *((name, pa.binary()) for name in COLUMNS.values())])


def schema_with(timesteps: bool) -> Any:
    """Return the schema of MLCommons' sets; training sets have no timesteps."""
    return SCHEMA.append(pa.field(TIMESTEP, pa.int32())) if timesteps else SCHEMA


def to_batch(samples: list[Sample], schema: Any) -> Any:
    """Return ``samples`` as a record batch of ``schema``."""
    values: dict[str, list[Any]] = {KEY: [sample.key for sample in samples]}
    for field, name in COLUMNS.items():
        values[name] = [to_bytes(getattr(sample, field)) for sample in samples]
    values[TIMESTEP] = [sample.timestep for sample in samples]
    return pa.record_batch([values[name] for name in schema.names], schema=schema)


class ArrowWriter(StreamWriter):
    """Writes the folder that ``datasets.load_from_disk`` reads, as the reference's merge does."""

    batch_size = 32  # 70 MB of the benchmark's samples

    def __init__(self, folder: Path, num_samples: int, shard_size: int, timesteps: bool) -> None:
        super().__init__(folder, shard_size)
        self._schema, self._num_files = schema_with(timesteps), -(-num_samples // shard_size)

    def _file_name(self, number: int) -> str:
        return f"data-{number:05d}-of-{self._num_files:05d}.arrow"

    def _open(self, path: Path) -> Any:
        metadata = {"huggingface": json.dumps({"info": _info(self._schema)})}
        return pa.ipc.new_stream(str(path), self._schema.with_metadata(metadata))

    def _write(self, file: Any, samples: list[Sample]) -> None:
        file.write_batch(to_batch(samples, self._schema))

    def _write_listing(self) -> None:
        info = {
            "citation": "",
            "description": "",
            "homepage": "",
            "license": "",
            **_info(self._schema),
        }
        state: dict[str, Any] = {
            "_data_files": [{"filename": name} for name in self.names],
            "_fingerprint": "fluxtrain",
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        for name, content in (("dataset_info.json", info), (STATE, state)):
            with atomic_write(self.folder / name) as partial:
                partial.write_text(json.dumps(content, indent=2), encoding="utf-8")


def _info(schema: Any) -> dict[str, Any]:
    values = ((name, str(schema.field(name).type)) for name in schema.names)
    return {"features": {name: {"dtype": dtype, "_type": "Value"} for name, dtype in values}}


# Fields of the flatbuffers in Arrow's Message.fbs, by their number.
_MESSAGE_HEADER, _DICTIONARY_DATA, _COMPRESSION = 2, 1, 3


def _is_compressed(content: memoryview, is_dictionary: bool) -> bool:
    """Return whether the batch of the message ``content`` names a compression."""
    batch = _table(content, _table_at(content, 0), _MESSAGE_HEADER)
    if is_dictionary and batch is not None:
        batch = _table(content, batch, _DICTIONARY_DATA)
    return batch is not None and _field(content, batch, _COMPRESSION) is not None


def _table(content: memoryview, table: int, number: int) -> int | None:
    """Return where the table in field ``number`` of ``table`` begins, None if the field is not set."""
    place = _field(content, table, number)
    return None if place is None else _table_at(content, place)


def _table_at(content: memoryview, place: int) -> int:
    return place + _number("<I", content, place)


def _field(content: memoryview, table: int, number: int) -> int | None:
    """Return the place of field ``number`` of ``table``, None if it is not set."""
    names = table - _number("<i", content, table)
    entry = 4 + 2 * number
    if entry + 2 > _number("<H", content, names):
        return None
    offset = _number("<H", content, names + entry)
    return table + offset if offset else None


def _number(kind: str, content: memoryview, place: int) -> int:
    if place < 0:
        raise struct.error
    (number,) = struct.unpack_from(kind, content, place)
    return int(number)
