"""MLCommons' layouts: read, written and converted exactly; damaged files raise DataError."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.trainer import ranks
from tests.trainer.data.formats.encoded_sets import (
    BAD_CELLS,
    COLUMNS,
    FIELDS,
    FOREIGN,
    LAYOUTS,
    SUFFIXES,
    assert_reads,
    cell,
    read,
    sample,
    save_stream,
    save_table,
    save_with_mean,
    table,
    write,
)
from tests.trainer.data.formats.tar_files import add_member
from webdataset.tariterators import group_by_keys, tar_file_iterator

from fluxtrain.cli import main
from fluxtrain.contract.run.data import Layout
from fluxtrain.data.formats import mlcommons
from fluxtrain.data.formats.convert import convert, detect, make_writer, open_encoded
from fluxtrain.errors import ConfigError, DataError, StorageError


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 5), (7,), (0,), ()])
def test_npy_files_are_read_back_exactly(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape).to(dtype)
    content = mlcommons.to_bytes(values)
    assert torch.equal(mlcommons.to_tensor(content), values)
    assert mlcommons.to_tensor(content).dtype == dtype
    assert np.load(io.BytesIO(content)).shape == shape


def test_random_damage_raises_nothing_but_value_error() -> None:
    rng, valid = np.random.default_rng(0), mlcommons.to_bytes(torch.zeros(2, 3))
    outcomes = set[bool]()
    for _ in range(1000):
        content = bytearray(valid)
        for place in rng.integers(0, len(valid), 3):
            content[place] = rng.integers(0, 256)
        try:
            outcomes.add(mlcommons.to_tensor(bytes(content)).numel() == 6)
        except ValueError:
            outcomes.add(False)
    assert outcomes == {True, False}


@pytest.mark.parametrize("to", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_becomes_every_other(tmp_path: Path, layout: Layout, to: Layout) -> None:
    source = write(tmp_path / "source", layout)
    assert convert(source, tmp_path / "target", to, shard_size=5) == 23
    dataset = open_encoded(tmp_path / "target", to)
    assert_reads(dataset, list(range(23)))
    assert [dataset.key(i) for i in range(23)] == [f"key-{i}" for i in range(23)]
    assert dataset.timesteps(np.arange(23)).tolist() == [(i * 3) % 8 for i in range(23)]
    assert not (tmp_path / "target.partial").exists()


def test_there_and_back_gives_equal_bytes(tmp_path: Path) -> None:
    first = write(tmp_path / "a", "arrow")
    convert(first, tmp_path / "b", "webdataset", shard_size=9)
    convert(tmp_path / "b", tmp_path / "c", "parquet", shard_size=9)
    convert(tmp_path / "c", tmp_path / "d", "arrow", shard_size=9)
    assert ranks.contents(first) == ranks.contents(tmp_path / "d")


def test_an_unreadable_sample_ends_a_conversion(tmp_path: Path) -> None:
    source = save_with_mean(tmp_path / "source", "arrow", b"")
    with pytest.raises(DataError, match=r"a\.arrow record 1 .*mean: missing"):
        convert(source, tmp_path / "target", "shards")
    assert not (tmp_path / "target").exists()


def test_a_target_that_was_written_wrong_is_not_renamed(tmp_path: Path) -> None:
    source, target = write(tmp_path / "source", "arrow"), tmp_path / "target"
    num_written = 0

    def flip_a_bit(samples: int) -> None:
        nonlocal num_written
        num_written += samples
        if num_written == 23:  # all but the last file exist
            path = target.with_name("target.partial") / "shard_000000.tar"
            content = bytearray(path.read_bytes())
            content[content.index(cell(sample(2).txt)) + 140] ^= 1
            path.write_bytes(content)

    with pytest.raises(StorageError, match="sample 2 differs from what was written"):
        convert(source, target, "webdataset", shard_size=9, advance=flip_a_bit)
    assert not target.exists()


def test_the_command_prints_its_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = write(tmp_path / "source", "shards"), tmp_path / "target"
    assert main(["convert", str(source), str(target), "--to", "arrow"]) == 0
    expected = f"{target}: 23 samples as arrow, each compared after writing\n"
    assert capsys.readouterr().out == expected
    assert main(["convert", str(source), str(target), "--to", "arrow"]) == 2
    assert "exists already; name a new folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("source", {}, "TARGET: got"),
        ("source/inside", {}, "is inside the source"),
        ("existing", {}, "exists already; name a new folder"),
        ("new", {"layout": "parquet"}, "no *.parquet is here"),
    ],
)
def test_unsuitable_source_and_target_are_refused(
    tmp_path: Path, target: str, options: dict[str, Any], message: str
) -> None:
    source = write(tmp_path / "source", "arrow")
    (tmp_path / "existing").mkdir()
    (tmp_path / "existing" / "file").touch()
    with pytest.raises((ConfigError, DataError)) as error:
        convert(source, tmp_path / target, "shards", **options)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (layout, name)
        for layout in FOREIGN
        for name in BAD_CELLS
        if layout != "webdataset" or name not in ("null", "empty")  # a member is missing: refused
    ],
)
def test_a_bad_cell_is_named_and_the_others_are_read(
    tmp_path: Path, layout: Layout, name: str
) -> None:
    dataset = open_encoded(save_with_mean(tmp_path / "set", layout, BAD_CELLS[name]))
    encodings, faults = read(dataset, [0, 1, 2])
    assert [fault is None for fault in faults] == [True, False, True]
    assert str(tmp_path / "set") in (faults[1] or "")
    assert "key-1" in (faults[1] or "")
    assert torch.equal(encodings.mean[2], sample(2).mean)


Edit = Callable[[Path], object]


def cut(keep: float = 0.6) -> Edit:
    return lambda path: path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])


def overwrite(content: bytes) -> Edit:
    return lambda path: path.write_bytes(content)


def state(content: Any) -> Edit:
    text = content if isinstance(content, str) else json.dumps(content)
    return lambda path: path.with_name("state.json").write_text(text)


def lists(*names: Any) -> Edit:
    return state({"_data_files": [{"filename": name} for name in names]})


def compress(path: Path) -> None:
    save_stream(path, table(9), options=pa.ipc.IpcWriteOptions(compression="zstd"))


def drop_column(path: Path) -> None:
    content = table(9).drop_columns(["logvar"])
    save_stream(path, content) if path.suffix == ".arrow" else pq.write_table(content, path)


def drop_member(path: Path) -> None:
    with tarfile.open(path) as old, tarfile.open(path.with_name("new"), "w") as new:
        for member in old.getmembers()[:-1]:
            new.addfile(member, old.extractfile(member))
    path.with_name("new").replace(path)


FIRST_FILES: dict[Layout, str] = {
    "arrow": "data-00000-of-00003.arrow",
    "parquet": "data_0_0000.parquet",
    "webdataset": "shard_000000.tar",
}
DAMAGED: dict[str, tuple[Edit, str]] = {
    "arrow cut off": (cut(), "not a whole Arrow stream"),
    "arrow cut in the schema": (cut(0.02), "not a whole Arrow stream"),
    "arrow empty": (overwrite(b""), "not a whole Arrow stream"),
    "arrow noise": (overwrite(b"\xff" * 999), "not a whole Arrow stream"),
    "arrow deleted": (Path.unlink, "missing"),
    "arrow compressed": (compress, "compressed"),
    "arrow column": (drop_column, "column 'logvar' is missing"),
    "arrow state path": (lists("../x"), "it lists"),
    "arrow state absolute": (lists("/x"), "lists"),
    "arrow state none": (lists(), "it lists no files"),
    "arrow state list": (state([]), "not the state of a saved data set"),
    "arrow state type": (lists(3), "not the state"),
    "arrow state deep": (state("[" * 100_000), "not the state of a saved data set"),
    "parquet cut off": (cut(), "not a whole parquet file"),
    "parquet noise": (overwrite(b"x" * 99), "not a whole"),
    "parquet column": (drop_column, "column 'logvar' is missing"),
    "webdataset cut off": (cut(), "not a whole tar"),
    "webdataset member": (drop_member, "it has no logvar.bytes"),
}


@pytest.mark.parametrize(
    ("layout", "edit", "message"),
    [(name.split()[0], *case) for name, case in DAMAGED.items()],
    ids=DAMAGED,
)
def test_a_damaged_file_is_refused(
    tmp_path: Path, layout: Layout, edit: Edit, message: str
) -> None:
    folder = write(tmp_path / "set", layout)
    edit(folder / FIRST_FILES[layout])
    with pytest.raises(DataError, match=message) as error:
        open_encoded(folder, layout)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("layout", FOREIGN)
def test_random_damage_raises_data_error_or_is_a_fault(tmp_path: Path, layout: Layout) -> None:
    folder, rng = write(tmp_path / "set", layout, count=9), np.random.default_rng(0)
    (path,) = (p for p in folder.iterdir() if p.suffix in (".arrow", ".parquet", ".tar"))
    content, outcomes = path.read_bytes(), set[bool]()
    for _ in range(100):
        damaged = bytearray(content)
        for place in rng.integers(0, len(content), 20):
            damaged[place] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            dataset = open_encoded(folder)
            outcomes.add(any(read(dataset, list(range(min(len(dataset), 9))))[1]))
        except DataError:
            outcomes.add(True)
    assert True in outcomes


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "no encoded data set is here (dataset.json is missing"),
        (["a.arrow", "b.tar"], "holds arrow and webdataset; set spec.run.data.layout"),
    ],
)
def test_a_folder_must_have_one_layout(tmp_path: Path, files: list[str], message: str) -> None:
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(DataError) as error:
        open_encoded(tmp_path)
    assert message in str(error.value)


@pytest.mark.parametrize("layout", FOREIGN)
def test_verifying_checksums_of_a_foreign_layout_is_refused(tmp_path: Path, layout: Layout) -> None:
    with pytest.raises(DataError, match=f"the layout {layout} stores no checksums"):
        open_encoded(write(tmp_path / "set", layout), verify=True)
