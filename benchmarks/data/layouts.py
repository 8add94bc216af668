"""Reading each layout of encoded samples, compared with its usual libraries; page cache warm.

One process copies every sample, of MLPerf's shapes in bfloat16 (2.16 MB), into batch-sized buffers. Those
libraries have no random access to tars and parquet, so both sides read them in order. Opening is included.
Times are processor times of all threads, which depend less on other programs.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import numpy as np
import torch
from benchmarks.data.loader import BATCH, SHAPE, SHARD, fields_of, samples, views
from benchmarks.table import print_table, spread

from fluxtrain.contract.run.data import Layout
from fluxtrain.data.dataset import Encodings
from fluxtrain.data.formats.convert import make_writer, open_encoded
from fluxtrain.data.formats.mlcommons import COLUMNS
from fluxtrain.data.formats.webdataset import SUFFIXES
from fluxtrain.data.shards import FIELDS
from fluxtrain.runtime.draws import Array

Reader = Callable[[Path, Encodings, Array], Iterator[None]]
"""Copies the samples in the order of the indices into the rows; yields after every batch."""


@dataclass(frozen=True)
class Contender:
    """One reader of one layout, at random or ``in_order``."""

    layout: Layout
    name: str
    read: Reader
    in_order: bool = False


def fluxtrain(folder: Path, rows: Encodings, order: Array) -> Iterator[None]:
    """Read any layout with this project's reader."""
    dataset, keep_text = open_encoded(folder), np.zeros(BATCH, dtype=bool)
    for indices in order.reshape(-1, BATCH):
        assert not any(dataset.read(indices, rows, keep_text))
        yield


def safetensors(folder: Path, rows: Encodings, order: Array) -> Iterator[None]:
    """Read one row of every tensor of our shards."""
    from safetensors import safe_open

    listing = json.loads((folder / "dataset.json").read_text())
    files = [safe_open(folder / shard["file"], framework="pt") for shard in listing["shards"]]
    slices = [[file.get_slice(name) for name in FIELDS] for file in files]

    def record(index: int) -> list[torch.Tensor]:
        shard, row = divmod(index, SHARD)
        return [each[row] for each in slices[shard]]

    for number, index in enumerate(order.tolist()):
        for target, value in zip(fields_of(rows), record(index), strict=True):
            target[number % BATCH] = value
        yield from _at_batch_end(number)


def datasets(folder: Path, rows: Encodings, order: Array) -> Iterator[None]:
    """Read as the MLPerf reference does: a row of the data set, and np.load of each cell."""
    from datasets import load_from_disk

    dataset = load_from_disk(str(folder))
    yield from _decoded(rows, (dataset[index] for index in order.tolist()))


def pyarrow(folder: Path, rows: Encodings, order: Array) -> Iterator[None]:
    """Read parquet in batches of as many rows as ours are, in order."""
    from pyarrow import parquet

    def records() -> Iterator[dict[str, Any]]:
        for path in sorted(folder.glob("*.parquet")):
            for batch in parquet.ParquetFile(path).iter_batches(BATCH, columns=[*COLUMNS.values()]):
                yield from batch.to_pylist()

    yield from _decoded(rows, records())


def pandas(folder: Path, rows: Encodings, order: Array) -> Iterator[None]:
    """Read whole parquet files, in order."""
    from pandas import read_parquet

    def records() -> Iterator[dict[str, Any]]:
        for path in sorted(folder.glob("*.parquet")):
            yield from read_parquet(path, columns=[*COLUMNS.values()]).to_dict("records")

    yield from _decoded(rows, records())


def webdataset(folder: Path, rows: Encodings, order: Array) -> Iterator[None]:
    """Read the repacked tars, in order."""
    import webdataset as wds

    urls = sorted(str(path) for path in folder.glob("*.tar"))
    names = [(COLUMNS[field], f"{SUFFIXES[field]}") for field in FIELDS]
    dataset = wds.WebDataset(urls, shardshuffle=False, empty_check=False)
    yield from _decoded(rows, ({c: sample[suffix] for c, suffix in names} for sample in dataset))


def _decoded(rows: Encodings, records: Iterator[dict[str, Any]]) -> Iterator[None]:
    """Copy records of .npy files to ``rows``."""
    targets = views(rows)
    for number, record in enumerate(records):
        for field, target in zip(FIELDS, targets, strict=True):
            target[number % BATCH] = np.load(io.BytesIO(record[COLUMNS[field]]))
        yield from _at_batch_end(number)


def _at_batch_end(number: int) -> Iterator[None]:
    """Yield once if sample ``number`` is the last of a batch."""
    if number % BATCH == BATCH - 1:
        yield


CONTENDERS = (
    Contender("shards", "fluxtrain", fluxtrain),
    Contender("shards", "safetensors", safetensors),
    Contender("arrow", "fluxtrain", fluxtrain),
    Contender("arrow", "datasets", datasets),
    Contender("parquet", "fluxtrain", fluxtrain, in_order=True),
    Contender("parquet", "pyarrow", pyarrow, in_order=True),
    Contender("parquet", "pandas", pandas, in_order=True),
    Contender("webdataset", "fluxtrain", fluxtrain),
    Contender("webdataset", "fluxtrain", fluxtrain, in_order=True),
    Contender("webdataset", "webdataset", webdataset, in_order=True),
)


def write(root: Path, count: int) -> None:
    """Write the same ``count`` samples in every layout, each in a folder of its name."""
    for layout in dict.fromkeys(contender.layout for contender in CONTENDERS):
        with make_writer(layout, root / layout, count, SHARD, timesteps=False) as writer:
            for sample in samples(count):
                writer.add(sample)


def num_different(contender: Contender, root: Path, order: Array) -> int:
    """Return the number of samples, read in ``order``, that are not bit-equal to those written."""
    expected = [[getattr(s, field).clone() for field in FIELDS] for s in samples(len(order))]
    rows, wrong, batches = Encodings.empty(BATCH, SHAPE), 0, iter(order.reshape(-1, BATCH))
    for _ in contender.read(root / contender.layout, rows, order):
        for row, index in enumerate(next(batches)):
            pairs = zip(fields_of(rows), expected[index], strict=True)
            wrong += not all(torch.equal(read[row], written) for read, written in pairs)
    return wrong + BATCH * sum(1 for _ in batches)


def race(root: Path, count: int, rounds: int) -> list[list[float]]:
    """Run all contenders in turn over ``count`` samples; return the processor seconds of each."""
    rows, rng = Encodings.empty(BATCH, SHAPE), np.random.default_rng(0)
    seconds: list[list[float]] = [[] for _ in CONTENDERS]
    for turn in range(rounds + 1):
        for times, contender in zip(seconds, CONTENDERS, strict=True):
            order = np.arange(count) if contender.in_order else rng.permutation(count)
            begin = process_time()
            batches = sum(1 for _ in contender.read(root / contender.layout, rows, order))
            assert batches * BATCH == count
            if turn:  # the first one warms the page cache
                times.append(process_time() - begin)
    return seconds


def table(seconds: list[list[float]], count: int) -> list[list[str]]:
    """Return the rows to print; ratios are relative to our reader of the same layout and order."""
    rows, ours = list[list[str]](), dict[tuple[str, bool], float]()
    for contender, times in zip(CONTENDERS, seconds, strict=True):
        own = ours.setdefault((contender.layout, contender.in_order), median(times))
        rates = [count / time for time in times]
        how = "in order" if contender.in_order else "at random"
        title = f"{contender.layout} {how}: {contender.name}"
        rows.append([title, spread(rates), f"{median(times) / own:.1f}"])
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Write the samples in every layout in a temporary folder, verify all readers and measure them."""
    parser = argparse.ArgumentParser(prog="benchmarks.data.layouts", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--samples", type=int, default=256, help="a multiple of 32")
    options, _ = parser.parse_known_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write(root, options.samples)
        orders = {True: np.arange(options.samples)}
        orders[False] = np.random.default_rng(1).permutation(options.samples)
        wrong = sum(num_different(each, root, orders[each.in_order]) for each in CONTENDERS)
        print(f"samples that differ, of {len(CONTENDERS)} readers: {wrong}")
        seconds = race(root, options.samples, options.rounds)
    print_table(
        f"reading every layout, one process, {options.samples} samples of 2.16 MB",
        ["", "samples/s per core", "times as long as ours"],
        table(seconds, options.samples),
    )


if __name__ == "__main__":
    main()
