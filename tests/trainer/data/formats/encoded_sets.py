"""Makers of encoded data sets in every layout, written by us and as other programs write them."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tests.trainer.data.formats.tar_files import add_member

from fluxtrain.contract.run.data import Layout
from fluxtrain.data.dataset import Encodings
from fluxtrain.data.formats.convert import make_writer
from fluxtrain.data.shard_dataset import FileDataset
from fluxtrain.data.shards import Sample

LAYOUTS: tuple[Layout, ...] = get_args(Layout)
FOREIGN = LAYOUTS[1:]
COLUMNS = ("t5_encodings", "clip_encodings", "mean", "logvar")
FIELDS = ("txt", "vec", "mean", "logvar")
SUFFIXES = ("t5", "clip", "mean", "logvar")


def sample(index: int, benchmark_size: bool = False, timestep: int | None = None) -> Sample:
    """Return a random sample, small or of the benchmark's size."""
    generator = torch.Generator().manual_seed(index)
    shapes = [(256, 4096), (768,), (16, 32, 32)] if benchmark_size else [(4, 16), (16,), (4, 4, 4)]

    def random(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    txt, vec, latent = shapes
    return Sample(
        f"key-{index}", "", random(txt), random(vec), random(latent), random(latent), timestep
    )


def write(
    folder: Path, layout: Layout, count: int = 23, timesteps: bool = True, shard_size: int = 9
) -> Path:
    with make_writer(layout, folder, count, shard_size, timesteps) as writer:
        for index in range(count):
            writer.add(sample(index, timestep=(index * 3) % 8 if timesteps else None))
    return folder


def read(
    dataset: FileDataset, indices: list[int], skip: list[bool] | None = None
) -> tuple[Encodings, list[str | None]]:
    encodings = Encodings.empty(len(indices), dataset.shape)
    for field in FIELDS:
        getattr(encodings, field).zero_()
    skipped = np.array(skip or [False] * len(indices))
    return encodings, dataset.read(np.array(indices), encodings, skipped)


def assert_reads(dataset: FileDataset, indices: list[int]) -> None:
    """Assert that the samples at ``indices`` are those of :func:`sample`."""
    encodings, faults = read(dataset, indices)
    assert not any(faults)
    for row, index in enumerate(indices):
        for field in FIELDS:
            expected = getattr(sample(index), field)
            assert torch.equal(getattr(encodings, field)[row], expected), index


def cell(values: torch.Tensor) -> bytes:
    """Return the reference's serialisation of a bfloat16 tensor."""
    buffer = io.BytesIO()
    np.save(buffer, values.view(torch.uint16).numpy())
    return buffer.getvalue()


def table(count: int, steps: Any = None) -> pa.Table:
    """Return samples in the reference's columns; ``steps`` None: no timestep column."""
    columns: dict[str, Any] = {"__key__": [f"key-{i}" for i in range(count)]}
    for field, name in zip(FIELDS, COLUMNS, strict=True):
        cells = [cell(getattr(sample(i), field)) for i in range(count)]
        columns[name] = pa.array(cells, pa.binary())
    if steps is not None:
        columns["timestep"] = pa.array(steps, pa.int32())
    return pa.table(columns)


def save_stream(path: Path, content: pa.Table, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.ipc.new_stream(str(path), content.schema, **options) as stream:
        stream.write_table(content, max_chunksize=7)
    return path.parent


def save_table(folder: Path, layout: Layout, content: pa.Table) -> Path:
    """Write ``content`` in one file of ``layout``, as other programs do."""
    folder.mkdir()
    if layout == "arrow":
        save_stream(folder / "a.arrow", content)
    elif layout == "parquet":
        pq.write_table(content, folder / "a.parquet")
    else:
        with tarfile.open(folder / "a.tar", "w") as tar:
            for index, record in enumerate(content.to_pylist()):
                metadata = {"key": record["__key__"]}
                if "timestep" in record:
                    metadata["timestep"] = record["timestep"]
                add_member(tar, f"{index:08d}.json", json.dumps(metadata).encode())
                for suffix, column in zip(SUFFIXES, COLUMNS, strict=True):
                    add_member(tar, f"{index:08d}.{suffix}.bytes", record[column])
    return folder


def save_with_mean(folder: Path, layout: Layout, mean: bytes | None) -> Path:
    """Write three samples, the second with the cell ``mean``."""
    means = [cell(sample(0).mean), mean, cell(sample(2).mean)]
    content = table(3).set_column(3, "mean", pa.array(means, pa.binary()))
    return save_table(folder, layout, content)


class Trap:
    """An object that ends the process when unpickled."""

    def __reduce__(self) -> tuple[Callable[[int], object], tuple[int]]:
        return sys.exit, (42,)


def _pickled() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array([Trap()], dtype=object), allow_pickle=True)
    return buffer.getvalue()


_VALID = cell(sample(1).mean)
_SHAPE = b"(4, 4, 4)"

BAD_CELLS: dict[str, bytes | None] = {  # one for every way in which a cell can be wrong
    "null": None,
    "empty": b"",
    "pickle": _pickled(),
    "cut off": _VALID[:-2],
    "shape": cell(sample(1).vec),
    "type": _VALID.replace(b"'<u2'", b"'<f2'"),
    "big endian": _VALID.replace(b"'<u2'", b"'>u2'"),
    "fortran": _VALID.replace(b"False", b"True "),
    "huge": _VALID.replace(_SHAPE, b"(9999999999, 4)"),
    "negative": _VALID.replace(_SHAPE, b"(-4, 4, -4)"),
    "code": _VALID.replace(_SHAPE, b"exit(42)  "),
    "NaN": cell(torch.full((4, 4, 4), torch.nan, dtype=torch.bfloat16)),
}
