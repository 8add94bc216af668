"""MLCommons' preprocessed sets as Hugging Face saves them: a folder of Arrow streams, read at random.

    folder/
      data-00000-of-00002.arrow   columns __key__, t5_encodings, clip_encodings, mean, logvar, timestep
      state.json                  lists the files
      dataset_info.json           the columns' types

A stream is mapped once to find where its cells lie; samples are then read without Arrow.
Axes: n samples, f fields.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from fluxtrain.data.layouts.mlcommons import (
    COLUMNS,
    KEY,
    TIMESTEP,
    Cells,
    KnownNotes,
    NpyDataset,
    checked_timesteps,
)
from fluxtrain.data.layouts.npy import to_bytes
from fluxtrain.data.shard_writer import Sample
from fluxtrain.draws import Array
from fluxtrain.errors import DataError
from fluxtrain.files import atomic_write

Read = TypeVar("Read")
STATE = "state.json"
_ROWS_PER_BATCH = 32  # 70 MB of the benchmark's samples
_MAX_STATE_BYTES = 1 << 24
OFFSETS = {
    pa.binary(): np.int32,
    pa.string(): np.int32,
    pa.large_binary(): np.int64,
    pa.large_string(): np.int64,
}
"""Types whose cells are runs of bytes, and the type of their offsets."""


def open_arrow(folder: Path) -> NpyDataset:
    """Return the samples of ``folder``; DataError, naming the file, where one is cut off or no stream."""
    return NpyDataset(folder, [_cells(path) for path in stream_files(folder)])


def stream_files(folder: Path) -> list[Path]:
    """Return the streams that ``folder`` lists, in that order, or all there are, by name."""
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
        listed = f"{outside[0]!r:.80}, which lies outside the folder" if outside else "no files"
        raise DataError(f"{state}: it lists {listed}")
    return [folder / name for name in names]


def read_batches(
    path: Path, check: Callable[[Path, Any], None], read: Callable[[Any, Any], Read]
) -> list[Read]:
    """Return what ``read`` finds in each record batch of the stream ``path``.

    It gets the batch and the mapped file that it lies in. ``check`` may refuse the schema. Raises DataError
    where the stream is cut off or none, or where ``read`` finds a batch damaged (a ValueError).
    """
    try:
        with pa.memory_map(str(path)) as file:
            mapped = file.read_buffer()
            stream = pa.ipc.open_stream(mapped)
            check(path, stream.schema)
            return [read(batch, mapped) for batch in stream]
    except FileNotFoundError:
        raise DataError(f"{path}: missing") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path}: not a whole Arrow stream ({brief(error)})") from None


def _cells(path: Path) -> Cells:
    """Return where the samples of the stream ``path`` lie; of the encodings only offsets are read."""
    found = read_batches(path, check_columns, _read_batch)
    table = np.concatenate(
        [np.empty((0, len(COLUMNS), 2), np.int64), *(cells for cells, _, _ in found)]
    )
    keys = [key for _, some, _ in found for key in some]
    steps = checked_timesteps(path, (step for _, _, some in found for step in some))
    return Cells(path, table[:, :, 0], table[:, :, 1], KnownNotes(keys, steps))


def _read_batch(batch: Any, mapped: Any) -> tuple[Array, list[str], list[Any]]:
    """Return offset and size of each cell, the keys and the timesteps."""
    _validate(batch)
    has_steps = TIMESTEP in batch.schema.names
    steps = batch[TIMESTEP].to_pylist() if has_steps else [None] * len(batch)
    cells = np.stack([spans(batch[name], mapped) for name in COLUMNS.values()], axis=1)
    return cells, texts(batch, KEY), steps


def _validate(batch: Any) -> None:
    """Raise ValueError where the offsets of a column of ours leave the stream: Arrow would follow them."""
    for name in (KEY, TIMESTEP, *COLUMNS.values()):
        if name in batch.schema.names:
            batch[name].validate(full=True)


def spans(column: Any, mapped: Any) -> Array:
    """Return offset in the file and size of each cell of ``column``; size 0 where it is null."""
    _, offsets, values = column.buffers()
    count = len(column) + column.offset
    inside = np.frombuffer(offsets, OFFSETS[column.type], count + 1)[column.offset :].astype(
        np.int64
    )
    start = values.address - mapped.address if values is not None else 0
    if values is not None and not 0 <= start <= mapped.size - values.size:
        raise ValueError("its cells are compressed; save it with datasets' save_to_disk")
    sizes = np.diff(inside)
    if column.null_count:
        sizes[column.is_null().to_numpy(zero_copy_only=False)] = 0
    return np.stack([start + inside[:-1], sizes], axis=1)


def texts(batch: Any, name: str) -> list[str]:
    """Return the column ``name`` as texts, empty ones where it is absent or null."""
    if name not in batch.schema.names:
        return [""] * batch.num_rows
    return [str(value or "") for value in batch[name].to_pylist()]


def brief(error: Exception) -> str:
    """Return the first printable words of what a damaged file made Arrow say."""
    words = " ".join(str(error).split())[:200]
    return words if words and words.isprintable() else type(error).__name__


def check_columns(path: Path, schema: Any) -> None:
    """Raise DataError where ``schema`` has not the columns of preprocessed samples."""
    for name in COLUMNS.values():
        if name not in schema.names:
            there = ", ".join(map(str, schema.names))[:200]
            raise DataError(f"{path}: column {name!r} is missing; it has {there}")
        if schema.field(name).type not in OFFSETS:
            raise DataError(f"{path}: column {name!r} is {schema.field(name).type}, not binary")


SCHEMA = pa.schema([(KEY, pa.string()), *((name, pa.binary()) for name in COLUMNS.values())])


def schema_with(timesteps: bool) -> Any:
    """Return the columns of MLCommons' sets; training sets have no timesteps."""
    return SCHEMA.append(pa.field(TIMESTEP, pa.int32())) if timesteps else SCHEMA


def to_batch(samples: list[Sample], schema: Any) -> Any:
    """Return ``samples`` as a record batch of ``schema``."""
    values: dict[str, list[Any]] = {KEY: [sample.key for sample in samples]}
    for field, name in COLUMNS.items():
        values[name] = [to_bytes(getattr(sample, field)) for sample in samples]
    values[TIMESTEP] = [sample.timestep for sample in samples]
    return pa.record_batch([values[name] for name in schema.names], schema=schema)


class ArrowWriter:
    """Writes the folder that ``datasets.load_from_disk`` reads, as the reference's merge does."""

    def __init__(self, folder: Path, num_samples: int, shard_size: int, timesteps: bool) -> None:
        """Write ``num_samples`` samples to files of ``shard_size``; each file appears whole or not at all."""
        self.folder, self._shard_size, self._schema = folder, shard_size, schema_with(timesteps)
        self._num_files = -(-num_samples // shard_size)
        self._waiting, self._in_file, self._names = list[Sample](), 0, list[str]()
        self._stream: Any = None

    def __enter__(self) -> ArrowWriter:
        """Return the writer."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Write what waits, and the two listings last, unless something went wrong."""
        if kind is None:
            self._finish_file()
            _write_listings(self.folder, self._names, self._schema)
        elif self._stream is not None:
            self._stream.close()

    def add(self, sample: Sample) -> None:
        """Append ``sample``."""
        self._waiting.append(sample)
        self._in_file += 1
        if len(self._waiting) == _ROWS_PER_BATCH:
            self._flush()
        if self._in_file == self._shard_size:
            self._finish_file()

    def _flush(self) -> None:
        if not self._waiting:
            return
        if self._stream is None:
            schema = self._schema.with_metadata(
                {"huggingface": json.dumps({"info": _info(self._schema)})}
            )
            self._names.append(f"data-{len(self._names):05d}-of-{self._num_files:05d}.arrow")
            self._stream = pa.ipc.new_stream(str(self._partial), schema)
        self._stream.write_batch(to_batch(self._waiting, self._schema))
        self._waiting = []

    @property
    def _partial(self) -> Path:
        return self.folder / f"{self._names[-1]}.partial"

    def _finish_file(self) -> None:
        self._flush()
        if self._stream is not None:
            self._stream.close()
            self._partial.replace(self.folder / self._names[-1])
        self._stream, self._in_file = None, 0


def _write_listings(folder: Path, names: list[str], schema: Any) -> None:
    info = {"citation": "", "description": "", "homepage": "", "license": "", **_info(schema)}
    state: dict[str, Any] = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "fluxtrain",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    for name, content in (("dataset_info.json", info), (STATE, state)):
        with atomic_write(folder / name) as partial:
            partial.write_text(json.dumps(content, indent=2))


def _info(schema: Any) -> dict[str, Any]:
    """Return the columns' types in the words of Hugging Face's datasets."""
    values = ((name, str(schema.field(name).type)) for name in schema.names)
    return {"features": {name: {"dtype": dtype, "_type": "Value"} for name, dtype in values}}
