"""MLCommons' layouts are read and written exactly, and interchangeably with other libraries."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tests.trainer.data.formats.encoded_sets import (
    COLUMNS,
    FIELDS,
    FOREIGN,
    LAYOUTS,
    SUFFIXES,
    add_member,
    assert_reads,
    cell,
    read,
    sample,
    save_table,
    save_with_mean,
    table,
    write,
)
from webdataset.tariterators import group_by_keys, tar_file_iterator

from fluxtrain.contract.run.data import Layout
from fluxtrain.data.formats.convert import detect, make_writer, open_encoded
from fluxtrain.errors import DataError


@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_are_read_exactly_in_any_order(tmp_path: Path, layout: Layout) -> None:
    dataset = open_encoded(write(tmp_path / "set", layout))
    assert detect(tmp_path / "set") == layout
    assert (len(dataset), dataset.shape.dtype) == (23, torch.bfloat16)
    indices = np.random.default_rng(0).permutation(23).tolist()
    assert_reads(dataset, [*indices, *indices[:5]])
    assert [dataset.key(index) for index in indices] == [f"key-{index}" for index in indices]
    steps = dataset.timesteps(np.array(indices))
    assert steps.tolist() == [(index * 3) % 8 for index in indices]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dropped_prompt_is_not_read(tmp_path: Path, layout: Layout) -> None:
    dataset = open_encoded(write(tmp_path / "set", layout))
    encodings, faults = read(dataset, [4, 17], [True, False])
    assert faults == [None, None]
    assert not encodings.txt[0].any()
    assert not encodings.vec[0].any()
    assert torch.equal(encodings.mean[0], sample(4).mean)
    assert torch.equal(encodings.txt[1], sample(17).txt)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_open_set_can_be_pickled(tmp_path: Path, layout: Layout) -> None:
    dataset = open_encoded(write(tmp_path / "set", layout))
    read(dataset, [3])
    assert_reads(pickle.loads(pickle.dumps(dataset)), [3, 11])


@pytest.mark.parametrize("layout", FOREIGN)
def test_cells_have_the_sizes_of_the_published_set(tmp_path: Path, layout: Layout) -> None:
    with make_writer(layout, tmp_path, 2, 2, True) as writer:
        for index in range(2):
            writer.add(sample(index, benchmark_size=True, timestep=index))
    records = list(raw_records(tmp_path, layout))
    sizes = [{len(record[column]) for record in records} for column in COLUMNS]
    assert sizes == [{2_097_280}, {1_664}, {32_896}, {32_896}]
    assert open_encoded(tmp_path).shape.txt == (256, 4096)


def raw_records(folder: Path, layout: Layout) -> Iterator[dict[str, Any]]:
    """Yield the samples of ``folder`` as other libraries read them, undecoded."""
    if layout == "arrow":
        yield from datasets.load_from_disk(str(folder))
    elif layout == "parquet":
        for path in sorted(folder.glob("*.parquet")):
            yield from pq.read_table(path).to_pylist()
    else:
        for group in grouped(folder):
            metadata = json.loads(group["json"])
            cells = {c: group[f"{s}.bytes"] for c, s in zip(COLUMNS, SUFFIXES, strict=True)}
            yield {"__key__": metadata["key"], "timestep": metadata.get("timestep"), **cells}


def grouped(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the samples of the tars as the library webdataset groups their members."""
    for path in sorted(folder.glob("*.tar")):
        with path.open("rb") as file:
            members = [{**each, "__url__": path.name} for each in tar_file_iterator(file)]
        yield from group_by_keys(members)


@pytest.mark.parametrize("layout", FOREIGN)
def test_other_libraries_read_what_we_write(tmp_path: Path, layout: Layout) -> None:
    records = list(raw_records(write(tmp_path / "set", layout), layout))
    assert [record["__key__"] for record in records] == [f"key-{index}" for index in range(23)]
    assert [record["timestep"] for record in records] == [(index * 3) % 8 for index in range(23)]
    for index, record in enumerate(records):
        for field, column in zip(FIELDS, COLUMNS, strict=True):
            values = torch.from_numpy(np.load(io.BytesIO(record[column]))).view(torch.bfloat16)
            assert torch.equal(values, getattr(sample(index), field))


@pytest.mark.parametrize("layout", FOREIGN)
def test_a_training_set_has_no_timestep_column(tmp_path: Path, layout: Layout) -> None:
    # The reference's loader cannot collate a column of nulls.
    folder = write(tmp_path / "set", layout, timesteps=False)
    if layout == "webdataset":
        assert json.loads(next(grouped(folder))["json"]) == {"key": "key-0"}
    else:
        assert all("timestep" not in record for record in raw_records(folder, layout))
    assert open_encoded(folder).timesteps(np.arange(10)).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]


def test_a_set_saved_by_hugging_face_is_read(tmp_path: Path) -> None:
    datasets.disable_progress_bars()
    pq.write_table(table(23, steps=[i % 8 for i in range(23)]), tmp_path / "part.parquet")
    saved = datasets.Dataset.from_parquet(
        str(tmp_path / "part.parquet"), cache_dir=str(tmp_path / "cache")
    )
    saved.save_to_disk(str(tmp_path / "set"), num_shards=3)
    dataset = open_encoded(tmp_path / "set")
    assert_reads(dataset, list(range(23)))
    assert dataset.stored_timesteps is not None


def test_the_parquet_parts_of_the_reference_are_read(tmp_path: Path) -> None:
    for rank in range(2):  # a row group per batch, as its script writes them
        with pq.ParquetWriter(tmp_path / f"data_{rank}_0000.parquet", table(1).schema) as part:
            for begin in range(rank * 10, rank * 10 + 10, 5):
                part.write_table(table(20).slice(begin, 5))
    assert_reads(open_encoded(tmp_path), [19, 0, 10, 9, 4, 5])


def test_tars_named_by_key_without_timesteps_are_read(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "shard_000000.tar", "w") as tar:
        for index in range(3):
            base = f"00000{index}123"
            for suffix, field in zip(SUFFIXES, FIELDS, strict=True):
                add_member(tar, f"{base}.{suffix}.bytes", cell(getattr(sample(index), field)))
            add_member(tar, f"{base}.json", json.dumps({"key": base}).encode())
    dataset = open_encoded(tmp_path)
    assert_reads(dataset, [2, 1, 0])
    assert (dataset.key(1), dataset.stored_timesteps) == ("000001123", None)


TIMESTEPS = {
    "stored": ([3, 1, 4, 1], [3, 1, 4, 1]),
    "null": ([None] * 4, None),
    "some null": ([3, None, 4, 1], None),
    "absent": (None, None),
}


@pytest.mark.parametrize(("steps", "expected"), TIMESTEPS.values(), ids=TIMESTEPS)
@pytest.mark.parametrize("layout", FOREIGN)
def test_a_null_or_absent_timestep_is_accepted(
    tmp_path: Path, layout: Layout, steps: Any, expected: list[int] | None
) -> None:
    dataset = open_encoded(save_table(tmp_path / "set", layout, table(4, steps)))
    stored = dataset.stored_timesteps
    assert (None if stored is None else stored.tolist()) == expected
    assert dataset.timesteps(np.arange(4)).tolist() == (expected or [0, 1, 2, 3])


@pytest.mark.parametrize("layout", FOREIGN)
@pytest.mark.parametrize("step", [8, -1])
def test_an_invalid_timestep_is_refused(tmp_path: Path, layout: Layout, step: int) -> None:
    folder = save_table(tmp_path / "set", layout, table(4, [0, 1, step, 3]))
    with pytest.raises(DataError, match="a timestep is not one of 0 to 7"):
        open_encoded(folder).timesteps(np.array([0]))


def test_an_equivalent_npy_header_is_accepted(tmp_path: Path) -> None:
    values = sample(1).mean.view(torch.uint16).numpy()
    other = io.BytesIO()
    np.lib.format.write_array(other, values, version=(2, 0))
    assert len(other.getvalue()) == len(cell(sample(1).mean))
    assert_reads(
        open_encoded(save_with_mean(tmp_path / "set", "arrow", other.getvalue())), [0, 1, 2]
    )
