"""Random reads of encoded samples, compared with bare preadv, WebDataset and Arrow; page cache warm.

All copy the same samples, of MLPerf's shapes in bfloat16, into the same batch-sized buffers:
txt 256 x 4096, vec 768, mean and logvar 16 x 32 x 32; 2.16 MB each.
"""

from __future__ import annotations

import argparse
import io
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from benchmarks.table import print_table, spread

from fluxtrain.data.dataset import Encodings, SampleShape
from fluxtrain.data.shard_dataset import ShardDataset
from fluxtrain.data.shards import FIELDS, Sample, ShardWriter
from fluxtrain.runtime.draws import Array

SHAPE = SampleShape((256, 4096), 768, (16, 32, 32), torch.bfloat16)
BATCH = 32
SHARD = 128
TARGET = 0.9
Reader = Callable[[Encodings, Array], None]
"""Reads the samples in the order of the given indices, or in its own order, into the rows."""


def samples(count: int) -> Iterator[Sample]:
    """Yield ``count`` random samples."""
    generator = torch.Generator().manual_seed(0)
    for index in range(count):
        rows = Encodings.empty(1, SHAPE)
        for tensor in fields_of(rows):
            tensor.normal_(generator=generator)
        yield Sample(f"{index:09d}", "", rows.txt[0], rows.vec[0], rows.mean[0], rows.logvar[0])


def batched(stream: Iterator[Sample], size: int) -> Iterator[list[Sample]]:
    """Yield ``stream`` in lists of ``size``; the last one may be shorter."""
    while group := list(islice(stream, size)):
        yield group


def fields_of(rows: Encodings) -> list[torch.Tensor]:
    """Return the tensors of ``rows`` in the order of ``FIELDS``."""
    return [getattr(rows, field) for field in FIELDS]


def views(rows: Encodings) -> list[Array]:
    """Return the rows as uint16 arrays, since NumPy has no bfloat16."""
    return [tensor.view(torch.uint16).numpy() for tensor in fields_of(rows)]


def npy(array: Array) -> bytes:
    """Return ``array`` as a .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def fluxtrain(folder: Path, count: int) -> Reader:
    """Write our format; return our reader."""
    with ShardWriter(folder, SHARD) as writer:
        writer.add_all(samples(count))
    dataset = ShardDataset(folder)
    keep_text = np.zeros(BATCH, dtype=bool)

    def read(rows: Encodings, order: Array) -> None:
        for indices in order.reshape(-1, BATCH):
            assert not any(dataset.read(indices, rows, keep_text))

    return read


def bare_preadv(folder: Path, count: int) -> Reader:
    """Write the samples' bytes to one file; read each with one system call."""
    folder.mkdir()
    path = folder / "samples.bin"
    with path.open("wb") as file:
        for sample in samples(count):
            for field in FIELDS:
                file.write(getattr(sample, field).view(torch.uint16).numpy().tobytes())
    stride = path.stat().st_size // count
    descriptor = os.open(path, os.O_RDONLY)

    def read(rows: Encodings, order: Array) -> None:
        buffers = [[memoryview(row).cast("B") for row in field] for field in views(rows)]
        targets = list(zip(*buffers, strict=True))
        for number, index in enumerate(order.tolist()):
            done = os.preadv(descriptor, targets[number % BATCH], index * stride)
            assert done == stride

    return read


def webdataset(folder: Path, count: int) -> Reader:
    """Write tars of .npy members; read them in order, the only way that webdataset supports."""
    import webdataset as wds

    folder.mkdir()
    for shard, group in enumerate(batched(samples(count), SHARD)):
        with tarfile.open(folder / f"{shard:06d}.tar", "w") as tar:
            for sample in group:
                for field in FIELDS:
                    content = npy(getattr(sample, field).view(torch.uint16).numpy())
                    entry = tarfile.TarInfo(f"{sample.key}.{field}.npy")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))
    urls = sorted(str(path) for path in folder.glob("*.tar"))

    def read(rows: Encodings, order: Array) -> None:
        decoded = wds.WebDataset(urls, shardshuffle=False, empty_check=False).decode()
        targets = views(rows)
        for number, sample in enumerate(decoded):
            for field, target in zip(FIELDS, targets, strict=True):
                target[number % BATCH] = sample[f"{field}.npy"]

    return read


def arrow(folder: Path, count: int) -> Reader:
    """Write the MLPerf reference's layout, a .npy file per Arrow cell; read with np.load."""
    import pyarrow as pa

    folder.mkdir()
    paths = []
    for shard, group in enumerate(batched(samples(count), SHARD)):
        columns = {
            field: [npy(getattr(sample, field).view(torch.uint16).numpy()) for sample in group]
            for field in FIELDS
        }
        table = pa.table(columns, schema=pa.schema([(field, pa.binary()) for field in FIELDS]))
        paths.append(folder / f"{shard:06d}.arrow")
        with pa.OSFile(str(paths[-1]), "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
            out.write_table(table)
    tables = [pa.ipc.open_stream(pa.memory_map(str(path))).read_all() for path in paths]
    table_of_all: Any = pa.concat_tables(tables)

    def read(rows: Encodings, order: Array) -> None:
        targets = views(rows)
        for number, index in enumerate(order.tolist()):
            for field, target in zip(FIELDS, targets, strict=True):
                cell = table_of_all[field][index].as_buffer()
                target[number % BATCH] = np.load(io.BytesIO(cell))

    return read


READERS: dict[str, Callable[[Path, int], Reader]] = {
    "fluxtrain, into reused buffers": fluxtrain,
    "bare preadv": bare_preadv,
    "webdataset, tars in order": webdataset,
    "Arrow + np.load (MLPerf reference)": arrow,
}


def race(folder: Path, count: int, rounds: int) -> dict[str, list[float]]:
    """Run all readers in turn over ``count`` samples; return the seconds of each."""
    readers = {name: make(folder / str(i), count) for i, (name, make) in enumerate(READERS.items())}
    rows, rng = Encodings.empty(BATCH, SHAPE), np.random.default_rng(0)
    seconds: dict[str, list[float]] = {name: [] for name in readers}
    for turn in range(rounds + 1):
        for name, read in readers.items():
            order = rng.permutation(count)
            begin = perf_counter()
            read(rows, order)
            if turn:  # the first one warms the page cache
                seconds[name].append(perf_counter() - begin)
    return seconds


def main(arguments: list[str] | None = None) -> None:
    """Write the data for each reader in a temporary folder, and measure."""
    parser = argparse.ArgumentParser(prog="benchmarks.data.loader", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--samples", type=int, default=256, help="a multiple of 32")
    parser.add_argument(
        "--folder", help="where to write; the system's temporary folder if left out"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        seconds = race(Path(folder), options.samples, options.rounds)
    bare = median(seconds["bare preadv"])
    stride = sum(tensor[0].nbytes for tensor in fields_of(Encodings.empty(1, SHAPE)))
    rows = []
    for name, times in seconds.items():
        rates = [options.samples / time for time in times]
        rows.append(
            [
                name,
                spread(rates),
                f"{median(rates) * stride / 1e9:.2f}",
                f"{bare / median(times):.0%}",
            ]
        )
    print_table(
        f"random reads of encoded samples, one process, {options.samples} samples of {stride / 1e6:.2f} MB"
        f" (target: ours >= {TARGET:.0%} of bare preadv)",
        ["", "samples/s", "GB/s", "of preadv"],
        rows,
    )


if __name__ == "__main__":
    main()
