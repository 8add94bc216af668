"""Encoded data sets, LoRAs and captions that claim, or decode to, far more than their bytes."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tests.trainer.bombs.limited import Make

from fluxtrain.adapter.file import read_adapter
from fluxtrain.data.arrow_images import ArrowImages
from fluxtrain.data.formats.convert import open_encoded
from fluxtrain.data.formats.mlcommons import COLUMNS, KEY
from fluxtrain.data.pictures.folder import read_metadata

MIB = 1 << 20


def open_set(path: Path) -> object:
    return len(open_encoded(path.parent))


def open_images(path: Path) -> object:
    return len(ArrowImages(path.parent))


def captions(path: Path) -> object:
    return len(read_metadata(path))


def adapter(path: Path) -> object:
    return read_adapter(path).path


def cell(*shape: int, claimed: tuple[int, ...] | None = None) -> bytes:
    """Return a .npy file of ``shape`` whose header claims ``claimed``."""
    file = io.BytesIO()
    header = {"descr": "<u2", "fortran_order": False, "shape": claimed or shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + bytes(2 * int(np.prod(shape)))


def columns(count: int = 2, **others: Any) -> dict[str, Any]:
    """Return the columns of ``count`` samples of the MLCommons sets; ``others`` replace some."""
    shapes = {"txt": (4, 8), "vec": (8,), "mean": (4, 2, 2), "logvar": (4, 2, 2)}
    given = {COLUMNS[field]: pa.array([cell(*shape)] * count) for field, shape in shapes.items()}
    return {KEY: pa.array([f"key-{n}" for n in range(count)]), **given, **others}


def stream(compression: str | None = None, **others: Any) -> Make:
    """Return what writes an Arrow stream; ``others`` are functions that make columns."""

    def make(folder: Path) -> Path:
        table = pa.table(columns(**{name: column() for name, column in others.items()}))
        return write_stream(folder, table, compression)

    return make


def write_stream(folder: Path, table: pa.Table, compression: str | None = None) -> Path:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(str(folder / "a.arrow"), table.schema, options=options) as file:
        file.write_table(table)
    return folder / "a.arrow"


def claims() -> Any:
    """Return cells of which each claims 2 GiB."""
    return pa.array([cell(4, 2, 2, claimed=(4, 2, 1 << 27))] * 2)


def state(folder: Path) -> Path:
    """Write a state.json of lists, which take some 25 times their text."""
    (folder / "state.json").write_text('{"_data_files": [' + "[]," * 2_000_000 + "[]]}")
    return folder / "state.json"


def image_stream(folder: Path) -> Path:
    table = pa.table({"png": pa.array([bytes(80 * MIB)]), "txt": ["a"]})
    return write_stream(folder, table, "zstd")


def long_key() -> Any:
    """Return two keys of 32 MiB as a dictionary: Arrow would copy the text for each row."""
    return pa.DictionaryArray.from_arrays(pa.array([0, 0]), pa.array(["k" * (32 * MIB)]))


def endless_rows(folder: Path) -> Path:
    """Write 12 million rows that have no cells."""
    count = 12_000_000
    given = {name: pa.nulls(count, pa.binary()) for name in COLUMNS.values()}
    table = pa.table({**given, KEY: pa.nulls(count, pa.string())})
    pq.write_table(table, folder / "a.parquet", compression="zstd", row_group_size=count)
    return folder / "a.parquet"


def large_entry(folder: Path) -> Path:
    """Write a dictionary of one cell of 80 MiB of zeros, for 16 rows, in some kilobytes."""
    shared = pa.DictionaryArray.from_arrays(pa.array([0] * 16), pa.array([bytes(80 * MIB)]))
    table = pa.table(columns(16, **{COLUMNS["txt"]: shared}))
    pq.write_table(
        table, folder / "a.parquet", compression="zstd", dictionary_pagesize_limit=1 << 30
    )
    return folder / "a.parquet"


def metadata_parquet(texts: Any, **options: Any) -> Make:
    """Return what writes a table of captions; ``texts`` makes its column, in the child."""

    def make(folder: Path) -> Path:
        column = texts()
        table = pa.table({"file_name": [f"{n}.png" for n in range(len(column))], "text": column})
        path = folder / "metadata.parquet"
        pq.write_table(table, path, compression="zstd", **options)
        return path

    return make


def one_text() -> Any:
    """Return 65,536 captions of 65,536 letters, all the same: 4 GiB."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * (1 << 16)), pa.array(["x" * (1 << 16)]))


def long_text() -> Any:
    return pa.array(["x" * (80 * MIB)])


def alike_texts() -> Any:
    return pa.array(["x" * (1 << 16)] * 2000)


def shard(shape: list[int], count: int) -> Make:
    """Return what writes a listing of one shard whose tensors claim ``shape``."""

    def make(folder: Path) -> Path:
        entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
        safetensors(folder, {name: entry for name in ("txt", "vec", "mean", "logvar")})
        listed = {"format": 1, "shards": [{"file": "a.safetensors", "samples": count}]}
        (folder / "dataset.json").write_text(json.dumps(listed))
        return folder / "a.safetensors"

    return make


def safetensors(folder: Path, entries: dict[str, Any], size: int = 0) -> Path:
    """Write a header of ``entries`` and ``size`` bytes, which take no space on the disk."""
    header = json.dumps(entries).encode()
    path = folder / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with path.open("r+b") as file:
        file.truncate(8 + len(header) + size)
    return path


def overlapping(folder: Path) -> Path:
    """Write 4,000 tensors that share 4 MiB."""
    entry = {"dtype": "F32", "shape": [MIB], "data_offsets": [0, 4 * MIB]}
    entries = {f"lora_unet_{n}.lora_down.weight": entry for n in range(4000)}
    return safetensors(folder, entries, 4 * MIB)


def sparse(folder: Path) -> Path:
    """Write one tensor of 1 TiB that takes no space."""
    entry = {"dtype": "F32", "shape": [1 << 38], "data_offsets": [0, 1 << 40]}
    return safetensors(folder, {"lora_unet_img_in.lora_A.weight": entry}, 1 << 40)


def long_header(folder: Path) -> Path:
    path = folder / "a.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 1 << 31))
        file.truncate(1 << 32)
    return path
