"""MLCommons' layouts: read and written exactly, trained from with equal losses; hostile files do no harm."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.free_ports import free_port
from tests.trainer import ranks
from tests.trainer.tiny_encoders import config, png, small_image, write_encoders, write_images
from webdataset.tariterators import group_by_keys, tar_file_iterator

from fluxtrain.cli import main
from fluxtrain.contract.launch import RunPaths
from fluxtrain.contract.run.config import Layout, RunConfig
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.data.batch import ImageBatch
from fluxtrain.data.dataset import Rows
from fluxtrain.data.empty_text import read_empty_text, write_empty_text
from fluxtrain.data.images.dataset import ImageSet
from fluxtrain.data.layouts import npy
from fluxtrain.data.layouts.convert import convert
from fluxtrain.data.layouts.detect import EncodedSource, detect, make_writer, open_encoded
from fluxtrain.data.loader import AnyBatch, evaluation_batches, training_batches
from fluxtrain.data.order import BatchShares
from fluxtrain.data.shard_writer import Sample
from fluxtrain.data.sources import Sources, open_empty_text, open_source
from fluxtrain.data.tar.dataset import TarImages
from fluxtrain.errors import ConfigError, DataError, StorageError
from fluxtrain.launch.torchrun import _check_before_starting as check_before_starting
from fluxtrain.precompute import preprocess

LAYOUTS: tuple[Layout, ...] = get_args(Layout)
FOREIGN = LAYOUTS[1:]
COLUMNS = ("t5_encodings", "clip_encodings", "mean", "logvar")
FIELDS = ("txt", "vec", "mean", "logvar")
SUFFIXES = ("t5", "clip", "mean", "logvar")


def sample(index: int, scale: int = 1, timestep: int | None = None) -> Sample:
    """Return a random sample; ``scale`` 1 is small, 256 the benchmark's."""
    generator = torch.Generator().manual_seed(index)
    shapes = [(256, 4096), (768,), (16, 32, 32)] if scale == 256 else [(4, 16), (16,), (4, 4, 4)]

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
    dataset: EncodedSource, indices: list[int], skip: list[bool] | None = None
) -> tuple[Rows, list[str | None]]:
    rows = Rows.empty(len(indices), dataset.shape)
    for field in FIELDS:
        getattr(rows, field).zero_()
    skipped = np.array(skip or [False] * len(indices))
    return rows, dataset.read(np.array(indices), rows, skipped)


def assert_equal(rows: Rows, indices: list[int]) -> None:
    for row, index in enumerate(indices):
        for field in FIELDS:
            assert torch.equal(getattr(rows, field)[row], getattr(sample(index), field)), index


def cell(values: torch.Tensor) -> bytes:
    """Return what the reference's serialisation makes of a bfloat16 tensor."""
    buffer = io.BytesIO()
    np.save(buffer, values.view(torch.uint16).numpy())
    return buffer.getvalue()


def table(count: int, steps: Any = None) -> pa.Table:
    """Return samples as the reference's tables hold them; ``steps`` None: no such column."""
    columns: dict[str, Any] = {"__key__": [f"key-{i}" for i in range(count)]}
    for field, name in zip(FIELDS, COLUMNS, strict=True):
        columns[name] = pa.array(
            [cell(getattr(sample(i), field)) for i in range(count)], pa.binary()
        )
    if steps is not None:
        columns["timestep"] = pa.array(steps, pa.int32())
    return pa.table(columns)


def save_stream(path: Path, content: pa.Table, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.ipc.new_stream(str(path), content.schema, **options) as stream:
        stream.write_table(content, max_chunksize=7)
    return path.parent


# Round trips


@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_come_back_exactly_in_any_order(tmp_path: Path, layout: Layout) -> None:
    dataset = open_encoded(write(tmp_path / "set", layout))
    assert detect(tmp_path / "set") == layout
    assert (len(dataset), dataset.shape.dtype) == (23, torch.bfloat16)
    indices = np.random.default_rng(0).permutation(23).tolist()
    rows, faults = read(dataset, [*indices, *indices[:5]])
    assert not any(faults)
    assert_equal(rows, [*indices, *indices[:5]])
    assert [dataset.key(index) for index in indices] == [f"key-{index}" for index in indices]
    steps = dataset.timesteps(np.array(indices))
    assert steps.tolist() == [(index * 3) % 8 for index in indices]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dropped_prompt_is_not_read(tmp_path: Path, layout: Layout) -> None:
    dataset = open_encoded(write(tmp_path / "set", layout))
    rows, faults = read(dataset, [4, 17], [True, False])
    assert faults == [None, None]
    assert not rows.txt[0].any()
    assert not rows.vec[0].any()
    assert torch.equal(rows.mean[0], sample(4).mean)
    assert torch.equal(rows.txt[1], sample(17).txt)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_set_goes_to_another_process(tmp_path: Path, layout: Layout) -> None:
    dataset = open_encoded(write(tmp_path / "set", layout))
    read(dataset, [3])
    rows, faults = read(pickle.loads(pickle.dumps(dataset)), [3, 11])
    assert not any(faults)
    assert_equal(rows, [3, 11])


@pytest.mark.parametrize("layout", FOREIGN)
def test_cells_have_the_sizes_of_the_published_set(tmp_path: Path, layout: Layout) -> None:
    with make_writer(layout, tmp_path, 2, 2, True) as writer:
        for index in range(2):
            writer.add(sample(index, scale=256, timestep=index))
    sizes = [[2_097_280], [1_664], [32_896], [32_896]]
    found = {column: set[int]() for column in COLUMNS}
    for record in raw_records(tmp_path, layout):
        for column in COLUMNS:
            found[column].add(len(record[column]))
    assert [sorted(found[column]) for column in COLUMNS] == sizes
    assert open_encoded(tmp_path).shape.txt == (256, 4096)


def raw_records(folder: Path, layout: Layout) -> Iterator[dict[str, Any]]:
    """Yield the samples of ``folder`` as the libraries of others read them, undecoded."""
    if layout == "arrow":
        import datasets

        yield from datasets.load_from_disk(str(folder))
    elif layout == "parquet":
        for path in sorted(folder.glob("*.parquet")):
            yield from pq.read_table(path).to_pylist()
    else:
        for found in grouped(folder):
            notes = json.loads(found["json"])
            cells = {c: found[f"{s}.bytes"] for c, s in zip(COLUMNS, SUFFIXES, strict=True)}
            yield {"__key__": notes["key"], "timestep": notes.get("timestep"), **cells}


def grouped(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the samples of the tars as the library webdataset groups their members."""
    for path in sorted(folder.glob("*.tar")):
        with path.open("rb") as file:
            members = [{**each, "__url__": path.name} for each in tar_file_iterator(file)]
        yield from group_by_keys(members)


@pytest.mark.parametrize("layout", FOREIGN)
def test_the_libraries_of_others_read_what_we_write(tmp_path: Path, layout: Layout) -> None:
    records = list(raw_records(write(tmp_path / "set", layout), layout))
    assert [record["__key__"] for record in records] == [f"key-{index}" for index in range(23)]
    assert [record["timestep"] for record in records] == [(index * 3) % 8 for index in range(23)]
    for index, record in enumerate(records):
        for field, column in zip(FIELDS, COLUMNS, strict=True):
            values = torch.from_numpy(np.load(io.BytesIO(record[column]))).view(torch.bfloat16)
            assert torch.equal(values, getattr(sample(index), field))


@pytest.mark.parametrize("layout", FOREIGN)
def test_a_training_set_has_no_timestep_at_all(tmp_path: Path, layout: Layout) -> None:
    # The reference's loader cannot collate a column of nulls.
    folder = write(tmp_path / "set", layout, timesteps=False)
    if layout == "webdataset":
        with tarfile.open(folder / "shard_000000.tar") as tar:
            notes = tar.extractfile("00000000.json")
            assert notes is not None
            assert json.loads(notes.read()) == {"key": "key-0"}
    else:
        assert all("timestep" not in record for record in raw_records(folder, layout))
    assert open_encoded(folder).timesteps(np.arange(10)).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]


# What others write


def test_what_hugging_face_saves_is_read(tmp_path: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    pq.write_table(table(23, steps=[i % 8 for i in range(23)]), tmp_path / "part.parquet")
    made = datasets.Dataset.from_parquet(
        str(tmp_path / "part.parquet"), cache_dir=str(tmp_path / "cache")
    )
    made.save_to_disk(str(tmp_path / "set"), num_shards=3)
    dataset = open_encoded(tmp_path / "set")
    rows, faults = read(dataset, list(range(23)))
    assert not any(faults)
    assert_equal(rows, list(range(23)))
    assert dataset.stored_timesteps is not None


def test_the_parts_of_the_reference_s_ranks_are_read(tmp_path: Path) -> None:
    for rank in range(2):  # a row group per batch, as its script writes them
        with pq.ParquetWriter(tmp_path / f"data_{rank}_0000.parquet", table(1).schema) as part:
            for begin in range(rank * 10, rank * 10 + 10, 5):
                part.write_table(table(20).slice(begin, 5))
    dataset = open_encoded(tmp_path)
    rows, faults = read(dataset, [19, 0, 10, 9, 4, 5])
    assert not any(faults)
    assert_equal(rows, [19, 0, 10, 9, 4, 5])


def test_tars_that_are_named_by_key_and_have_no_timestep_are_read(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "shard_000000.tar", "w") as tar:
        for index in range(3):
            base = f"00000{index}123"
            members = {
                f"{base}.{suffix}.bytes": cell(getattr(sample(index), field))
                for suffix, field in zip(SUFFIXES, FIELDS, strict=True)
            }
            members[f"{base}.json"] = json.dumps({"key": base}).encode()
            put(tar, members)
    dataset = open_encoded(tmp_path)
    rows, faults = read(dataset, [2, 1, 0])
    assert not any(faults)
    assert_equal(rows, [2, 1, 0])
    assert (dataset.key(1), dataset.stored_timesteps) == ("000001123", None)


def put(tar: tarfile.TarFile, members: dict[str, bytes]) -> None:
    for name, content in members.items():
        header = tarfile.TarInfo(name)
        header.size = len(content)
        tar.addfile(header, io.BytesIO(content))


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([3, 1, 4, 1], [3, 1, 4, 1]),
        ([None] * 4, None),
        ([3, None, 4, 1], None),
        (None, None),
    ],
    ids=["stored", "null", "some null", "absent"],
)
@pytest.mark.parametrize("layout", FOREIGN)
def test_a_null_or_absent_timestep_is_tolerated(
    tmp_path: Path, layout: Layout, steps: Any, expected: list[int] | None
) -> None:
    dataset = open_encoded(write_foreign(tmp_path / "set", layout, steps))
    stored = dataset.stored_timesteps
    assert (None if stored is None else stored.tolist()) == expected
    assert dataset.timesteps(np.arange(4)).tolist() == (expected or [0, 1, 2, 3])


def write_foreign(folder: Path, layout: Layout, steps: Any) -> Path:
    """Write four samples as others do, with ``steps`` for timesteps."""
    folder.mkdir()
    if layout == "arrow":
        save_stream(folder / "data-00000-of-00001.arrow", table(4, steps))
    elif layout == "parquet":
        pq.write_table(table(4, steps), folder / "data_0_0000.parquet")
    else:
        with tarfile.open(folder / "shard_000000.tar", "w") as tar:
            for index in range(4):
                notes = {"key": str(index)} | ({} if steps is None else {"timestep": steps[index]})
                members = {f"{index:08d}.json": json.dumps(notes).encode()}
                for suffix, field in zip(SUFFIXES, FIELDS, strict=True):
                    members[f"{index:08d}.{suffix}.bytes"] = cell(getattr(sample(index), field))
                put(tar, members)
    return folder


@pytest.mark.parametrize("layout", FOREIGN)
@pytest.mark.parametrize("step", [8, -1])
def test_a_timestep_that_is_none_is_refused(tmp_path: Path, layout: Layout, step: int) -> None:
    with pytest.raises(DataError, match="a timestep is not one of 0 to 7"):
        open_encoded(write_foreign(tmp_path / "set", layout, [0, 1, step, 3])).timesteps(
            np.array([0])
        )


# One bad sample


def spoiled(kind: str) -> bytes | None:
    """Return a cell that is wrong in one way."""
    good = cell(sample(1).mean)
    pickled = io.BytesIO()
    np.save(pickled, np.array([Trap()], dtype=object), allow_pickle=True)
    return {
        "null": None,
        "empty": b"",
        "pickle": pickled.getvalue(),
        "cut off": good[:-2],
        "shape": cell(sample(1).vec),
        "type": good.replace(b"'<u2'", b"'<f2'"),
        "big endian": good.replace(b"'<u2'", b"'>u2'"),
        "fortran": good.replace(b"False", b"True "),
        "huge": good.replace(b"(4, 4, 4)", b"(9999999999, 4)"),
        "negative": good.replace(b"(4, 4, 4)", b"(-4, 4, -4)"),
        "code": good.replace(b"(4, 4, 4)", b"exit(42)  "),
        "NaN": cell(torch.full((4, 4, 4), torch.nan, dtype=torch.bfloat16)),
    }[kind]


class Trap:
    """An object that would end the process when unpickled."""

    def __reduce__(self) -> tuple[Callable[[int], object], tuple[int]]:
        return sys.exit, (42,)


KINDS = (
    "null", "empty", "pickle", "cut off", "shape", "type", "big endian", "fortran", "huge",
    "negative", "code", "NaN",
)  # fmt: skip


BAD_CELLS = [
    (layout, kind)
    for layout in FOREIGN
    for kind in KINDS  # a tar without a member is refused as a whole
    if layout != "webdataset" or kind not in ("null", "empty")
]


@pytest.mark.parametrize(("layout", "kind"), BAD_CELLS)
def test_a_bad_cell_is_named_and_the_others_are_read(
    tmp_path: Path, layout: Layout, kind: str
) -> None:
    dataset = open_encoded(write_with(tmp_path / "set", layout, spoiled(kind)))
    rows, faults = read(dataset, [0, 1, 2])
    assert [fault is None for fault in faults] == [True, False, True]
    assert str(tmp_path / "set") in (faults[1] or "")
    assert "key-1" in (faults[1] or "")
    assert torch.equal(rows.mean[2], sample(2).mean)


def write_with(folder: Path, layout: Layout, bad: bytes | None) -> Path:
    """Write three samples, the second with ``bad`` in the place of its mean."""
    content = table(3)
    means = pa.array([cell(sample(0).mean), bad, cell(sample(2).mean)], pa.binary())
    content = content.set_column(3, "mean", means)
    folder.mkdir()
    if layout == "arrow":
        save_stream(folder / "a.arrow", content)
    elif layout == "parquet":
        pq.write_table(content, folder / "a.parquet")
    else:
        with tarfile.open(folder / "a.tar", "w") as tar:
            for index, record in enumerate(content.to_pylist()):
                members = {f"{index}.json": json.dumps({"key": record["__key__"]}).encode()}
                for suffix, column in zip(SUFFIXES, COLUMNS, strict=True):
                    members[f"{index}.{suffix}.bytes"] = record[column]
                put(tar, members)
    return folder


def test_a_header_written_in_another_way_is_read(tmp_path: Path) -> None:
    values = sample(1).mean.view(torch.uint16).numpy()
    other = io.BytesIO()
    np.lib.format.write_array(other, values, version=(2, 0))
    assert len(other.getvalue()) == len(cell(sample(1).mean))
    dataset = open_encoded(write_with(tmp_path / "set", "arrow", other.getvalue()))
    rows, faults = read(dataset, [0, 1, 2])
    assert not any(faults)
    assert_equal(rows, [0, 1, 2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 5), (7,), (0,), ()])
def test_npy_files_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape).to(dtype)
    content = npy.to_bytes(values)
    assert torch.equal(npy.to_tensor(content), values)
    assert npy.to_tensor(content).dtype == dtype
    assert np.load(io.BytesIO(content)).shape == shape


def test_damaged_npy_files_are_read_or_refused_with_a_reason() -> None:
    rng, good = np.random.default_rng(0), npy.to_bytes(torch.zeros(2, 3))
    outcomes = set[bool]()
    for _ in range(1000):
        content = bytearray(good)
        for place in rng.integers(0, len(good), 3):
            content[place] = rng.integers(0, 256)
        try:
            outcomes.add(npy.to_tensor(bytes(content)).numel() == 6)
        except ValueError:
            outcomes.add(False)
    assert outcomes == {True, False}


# Hostile and broken files


def cut(path: Path, keep: float = 0.6) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])


def state(folder: Path, content: Any) -> None:
    (folder / "state.json").write_text(content if isinstance(content, str) else json.dumps(content))


def compressed(folder: Path) -> None:
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    save_stream(folder / "data-00000-of-00003.arrow", table(9), options=options)


def narrow(folder: Path, layout: Layout) -> None:
    """Replace the first file by one without a column."""
    content = table(9).drop_columns(["logvar"])
    if layout == "arrow":
        save_stream(folder / "data-00000-of-00003.arrow", content)
    else:
        pq.write_table(content, folder / "data_0_0000.parquet")


def remove_member(folder: Path) -> None:
    path = folder / "shard_000000.tar"
    with tarfile.open(path) as old, tarfile.open(folder / "new", "w") as new:
        for member in old.getmembers()[:-1]:
            new.addfile(member, old.extractfile(member))
    (folder / "new").replace(path)


ARROW = "data-00000-of-00003.arrow"
BROKEN: list[tuple[str, Layout, Callable[[Path], object], str]] = [
    ("cut off", "arrow", lambda f: cut(f / ARROW), "not a whole Arrow stream"),
    ("cut in the schema", "arrow", lambda f: cut(f / ARROW, 0.02), "not a whole Arrow stream"),
    ("empty", "arrow", lambda f: (f / ARROW).write_bytes(b""), "not a whole Arrow stream"),
    (
        "noise",
        "arrow",
        lambda f: (f / ARROW).write_bytes(b"\xff" * 999),
        "not a whole Arrow stream",
    ),
    ("gone", "arrow", lambda f: (f / ARROW).unlink(), "missing"),
    ("compressed", "arrow", compressed, "compressed"),
    ("column", "arrow", lambda f: narrow(f, "arrow"), "column 'logvar' is missing"),
    (
        "state path",
        "arrow",
        lambda f: state(f, {"_data_files": [{"filename": "../x"}]}),
        "it lists",
    ),
    ("state absolute", "arrow", lambda f: state(f, {"_data_files": [{"filename": "/x"}]}), "lists"),
    ("state none", "arrow", lambda f: state(f, {"_data_files": []}), "it lists no files"),
    ("state list", "arrow", lambda f: state(f, []), "not the state of a saved data set"),
    (
        "state type",
        "arrow",
        lambda f: state(f, {"_data_files": [{"filename": 3}]}),
        "not the state",
    ),
    ("state deep", "arrow", lambda f: state(f, "[" * 100_000), "not the state of a saved data set"),
    ("cut off", "parquet", lambda f: cut(f / "data_0_0000.parquet"), "not a whole parquet file"),
    (
        "noise",
        "parquet",
        lambda f: (f / "data_0_0000.parquet").write_bytes(b"x" * 99),
        "not a whole",
    ),
    ("column", "parquet", lambda f: narrow(f, "parquet"), "column 'logvar' is missing"),
    ("cut off", "webdataset", lambda f: cut(f / "shard_000000.tar"), "not a whole tar"),
    ("member", "webdataset", remove_member, "it has no logvar.bytes"),
]


@pytest.mark.parametrize(
    ("layout", "spoil", "words"), [b[1:] for b in BROKEN], ids=[f"{b[1]} {b[0]}" for b in BROKEN]
)
def test_a_broken_file_is_refused_by_name(
    tmp_path: Path, layout: Layout, spoil: Callable[[Path], object], words: str
) -> None:
    folder = write(tmp_path / "set", layout)
    spoil(folder)
    with pytest.raises(DataError, match=words) as caught:
        open_encoded(folder, layout)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layout", FOREIGN)
def test_damaged_files_are_refused_or_their_samples_named(tmp_path: Path, layout: Layout) -> None:
    folder, rng = write(tmp_path / "set", layout, count=9), np.random.default_rng(0)
    (path,) = (p for p in folder.iterdir() if p.suffix in (".arrow", ".parquet", ".tar"))
    content, outcomes = path.read_bytes(), set[bool]()
    for _ in range(100):
        bad = bytearray(content)
        for place in rng.integers(0, len(content), 20):
            bad[place] = rng.integers(0, 256)
        path.write_bytes(bad)
        try:
            dataset = open_encoded(folder)
            outcomes.add(any(read(dataset, list(range(min(len(dataset), 9))))[1]))
        except DataError:
            outcomes.add(True)
    assert True in outcomes


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], "no encoded data set is here (dataset.json is missing"),
        (["a.arrow", "b.tar"], "holds arrow and webdataset; say which with spec.run.data.layout"),
    ],
)
def test_a_folder_must_say_what_it_holds(tmp_path: Path, files: list[str], words: str) -> None:
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(DataError) as caught:
        open_encoded(tmp_path)
    assert words in str(caught.value)


@pytest.mark.parametrize("layout", FOREIGN)
def test_checksums_are_asked_for_in_vain(tmp_path: Path, layout: Layout) -> None:
    with pytest.raises(DataError, match=f"the layout {layout} stores no checksums"):
        open_encoded(write(tmp_path / "set", layout), verify=True)


# The empty prompt


def test_mlcommons_empty_encodings_are_read(tmp_path: Path) -> None:
    txt, vec = np.random.rand(1, 4, 16).astype(np.float16), np.random.rand(1, 16).astype(np.float16)
    np.save(tmp_path / "t5_empty.npy", txt)
    np.save(tmp_path / "clip_empty.npy", vec)
    found = read_empty_text(tmp_path)
    assert np.array_equal(found[0].numpy(), txt[0])
    assert np.array_equal(found[1].numpy(), vec[0])


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("t5_empty.npy", None, "missing"),
        ("clip_empty.npy", spoiled("pickle"), "of type |O"),
        ("t5_empty.npy", cell(sample(0).txt), "not that of one prompt's encodings"),
        ("clip_empty.npy", b"x", "no .npy file"),
    ],
)
def test_empty_encodings_of_another_kind_are_refused(
    tmp_path: Path, name: str, content: bytes | None, words: str
) -> None:
    write_empty_text(tmp_path / "empty", sample(0).txt, sample(0).vec)
    path = tmp_path / "empty" / name
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_empty_text(tmp_path / "empty")
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


# Conversion


@pytest.mark.parametrize("to", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_becomes_every_other(tmp_path: Path, layout: Layout, to: Layout) -> None:
    source = write(tmp_path / "source", layout)
    assert convert(source, tmp_path / "target", to, shard_size=5) == 23
    dataset = open_encoded(tmp_path / "target", to)
    rows, faults = read(dataset, list(range(23)))
    assert not any(faults)
    assert_equal(rows, list(range(23)))
    assert [dataset.key(i) for i in range(23)] == [f"key-{i}" for i in range(23)]
    assert dataset.timesteps(np.arange(23)).tolist() == [(i * 3) % 8 for i in range(23)]
    assert not (tmp_path / "target.partial").exists()


def test_there_and_back_gives_equal_bytes(tmp_path: Path) -> None:
    first = write(tmp_path / "a", "arrow")
    convert(first, tmp_path / "b", "webdataset", shard_size=9)
    convert(tmp_path / "b", tmp_path / "c", "parquet", shard_size=9)
    convert(tmp_path / "c", tmp_path / "d", "arrow", shard_size=9)
    assert ranks.contents(first) == ranks.contents(tmp_path / "d")


def test_a_sample_that_cannot_be_read_ends_a_conversion(tmp_path: Path) -> None:
    source = write_with(tmp_path / "source", "arrow", b"")
    with pytest.raises(DataError, match=r"a\.arrow record 1 .*mean: missing"):
        convert(source, tmp_path / "target", "shards")
    assert not (tmp_path / "target").exists()


def test_what_was_written_wrong_does_not_get_its_name(tmp_path: Path) -> None:
    source, target = write(tmp_path / "source", "arrow"), tmp_path / "target"

    def spoil(done: int, seen: list[int] = []) -> None:  # noqa: B006  (counts over calls)
        seen.append(done)
        if len(seen) == 23:  # all but the last file are there: one bit of a T5 encoding turns
            path = target.with_name("target.partial") / "shard_000000.tar"
            content = bytearray(path.read_bytes())
            content[content.index(cell(sample(2).txt)) + 140] ^= 1
            path.write_bytes(content)

    with pytest.raises(StorageError, match="sample 2 does not read as it was written"):
        convert(source, target, "webdataset", shard_size=9, advance=spoil)
    assert not target.exists()


def test_the_command_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = write(tmp_path / "source", "shards"), tmp_path / "target"
    assert main(["convert", str(source), str(target), "--to", "arrow"]) == 0
    expected = f"{target}: 23 samples as arrow, each compared after writing\n"
    assert capsys.readouterr().out == expected
    assert main(["convert", str(source), str(target), "--to", "arrow"]) == 2
    assert "is there already; name a folder that is not" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        ("source", {}, "TARGET: got"),
        ("source/inside", {}, "lies inside the source"),
        ("there", {}, "is there already; name a folder that is not"),
        ("new", {"layout": "parquet"}, "no *.parquet is here"),
    ],
)
def test_a_conversion_that_makes_no_sense_is_refused(
    tmp_path: Path, target: str, options: dict[str, Any], words: str
) -> None:
    source = write(tmp_path / "source", "arrow")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    with pytest.raises((ConfigError, DataError)) as caught:
        convert(source, tmp_path / target, "shards", **options)
    assert words in str(caught.value)


# Training


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """Return roots with pictures, encoders, and the preprocessed samples in every layout."""
    root = tmp_path_factory.mktemp("prepared")
    write_images(root / "train", 37)
    write_images(root / "validation", 16, timesteps=True, first=100)
    write_encoders(root)
    paths = RunPaths(root / "out", root, root)
    run = config(task="preprocess", encoders={"precision": "bfloat16"})
    assert ranks.finish(preprocess, run, paths) == [0], ranks.said(paths)
    for layout in FOREIGN:
        for part in ("train", "validation"):
            convert(root / "preprocessed" / part, root / layout / part, layout, shard_size=10)
    (root / "shards").symlink_to(root / "preprocessed")
    return paths


TRAINING = {
    "schedule": {"steps": 8, "global_batch_size": 12},
    "parallel": {"micro_batch_size": 6},
    "logging": {"every_steps": 1, "metrics_port": 0, "ledger": True},
    "evaluation": {"every_samples": 48, "batch_size": 5, "at_end": True},
    "checkpoint": {"every_steps": 3},
}


def encoded_run(layout: Layout, **changes: Any) -> RunConfig:
    data = {
        "source": "encoded",
        "train": f"{layout}/train",
        "validation": f"{layout}/validation",
        "empty_encodings": "preprocessed/empty.safetensors",
    }
    return config(**merge(merge(TRAINING, {"data": data}), changes))


def losses(output: Path) -> list[float]:
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [r.get("train_loss", r.get("eval_loss")) for r in map(json.loads, lines)]


def trained(run: RunConfig, prepared: RunPaths, output: Path) -> list[float]:
    """Train and return all losses, of training and evaluation."""
    paths = RunPaths(output, prepared.data, prepared.models)
    assert ranks.finish(ranks.train_alone, run, paths) == [0], ranks.said(paths)
    return losses(output)


def test_losses_are_the_same_to_the_last_bit_from_every_layout(
    prepared: RunPaths, tmp_path: Path
) -> None:
    found = {
        layout: trained(
            encoded_run(layout, data={"num_workers": LAYOUTS.index(layout) % 2}),
            prepared,
            tmp_path / layout,
        )
        for layout in LAYOUTS
    }
    assert len(found["shards"]) == 8 + 2
    assert all(each == found["shards"] for each in found.values())


def training(
    run: RunConfig, root: Path, rank: int = 0, ranks: int = 1, micro: int = 6, first: int = 0
) -> Iterator[AnyBatch]:
    """Return the micro batches of ``rank``; no validation set is needed."""
    source = open_source(run, root, "train")
    empty = None if isinstance(source, ImageSet) else open_empty_text(run, root, source)
    shares = BatchShares(run.schedule.global_batch_size, micro, ranks)
    return training_batches(run, Sources(source, source, empty), shares, rank, first)


@pytest.mark.parametrize("layout", FOREIGN)
def test_batches_of_every_layout_are_equal_through_loader_processes(
    prepared: RunPaths, layout: Layout
) -> None:
    def batches(name: Layout) -> list[Any]:
        run = encoded_run(name, data={"num_workers": 2, "layout": name})
        source = open_source(run, prepared.data, "validation")
        train = training(run, prepared.data, rank=1, ranks=2, micro=3, first=2)
        return [*train, *evaluation_batches(run, source, 0, 2)]

    for ours, theirs in zip(batches("shards"), batches(layout), strict=True):
        assert ours.faults == theirs.faults == ()
        pairs = zip(ours.tensors().items(), theirs.tensors().items(), strict=True)
        for (name, mine), (other, its) in pairs:
            assert name == other
            assert torch.equal(mine, its), name


def raw_run(**changes: Any) -> RunConfig:
    return config(**merge(TRAINING, changes))


@pytest.fixture(scope="module")
def from_pictures(prepared: RunPaths, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return trained(raw_run(), prepared, tmp_path_factory.mktemp("pictures") / "run")


def test_training_from_pictures_is_training_from_their_encodings(
    prepared: RunPaths, from_pictures: list[float], tmp_path: Path
) -> None:
    paths = RunPaths(tmp_path / "out", tmp_path, prepared.models)
    for part in ("train", "validation"):
        shutil.copytree(prepared.data / part, tmp_path / part)
    assert ranks.finish(preprocess, config(task="preprocess"), paths) == [0]  # in float32
    (tmp_path / "shards").symlink_to(tmp_path / "preprocessed")
    from_encodings = trained(encoded_run("shards"), paths, tmp_path / "run")
    worst = max(abs(a - b) / b for a, b in zip(from_pictures, from_encodings, strict=True))
    print(f"\nlargest relative difference of {len(from_pictures)} losses: {worst:.1e}")
    assert worst < 1e-5


@pytest.mark.parametrize("size", [3, 5])
def test_training_from_pictures_is_the_same_on_ranks_with_unequal_shares(
    prepared: RunPaths, from_pictures: list[float], tmp_path: Path, size: int
) -> None:
    paths = RunPaths(tmp_path / "run", prepared.data, prepared.models)
    run = raw_run(parallel={"micro_batch_size": 2})
    together = partial(ranks.train_together, port=free_port())
    assert ranks.finish(together, run, paths, size) == [0] * size, ranks.said(paths)
    assert losses(tmp_path / "run") == pytest.approx(from_pictures, rel=1e-4)
    ledgers = (tmp_path / "run/ledger").glob("rank_*.jsonl")
    used = [json.loads(line) for path in ledgers for line in path.read_text().splitlines()]
    first_steps = [index for line in used if line["step"] <= 3 for index in line["indices"]]
    assert len(set(first_steps)) == len(first_steps) == 36  # of the first epoch's 37
    assert min(first_steps) >= 0


def test_pictures_that_only_fill_up_are_black_and_weigh_nothing(prepared: RunPaths) -> None:
    shares = [list(training(raw_run(), prepared.data, r, 5, 3)) for r in range(5)]
    last = shares[4][0]
    assert isinstance(last, ImageBatch)
    assert last.indices.tolist() == [-1, -1, -1]  # of 15 positions 12 have samples
    assert last.weights.tolist() == [0.0, 0.0, 0.0]
    assert (last.captions, last.faults) == (("", "", ""), ())
    assert not last.images.any()


def test_training_from_pictures_resumes_exactly(
    prepared: RunPaths, from_pictures: list[float], tmp_path: Path
) -> None:
    trained(raw_run(schedule={"steps": 5}), prepared, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/step_0000000005")  # as if killed after step 5
    again = trained(raw_run(data={"num_workers": 2}), prepared, tmp_path / "run")
    ledger = (tmp_path / "run/ledger/rank_00000.jsonl").read_text()
    used = [json.loads(line) for line in ledger.splitlines()]
    assert again == from_pictures
    assert [line["step"] for line in used] == list(range(1, 9))
    first_epoch = [index for line in used for index in line["indices"]][:37]
    assert sorted(first_epoch) == list(range(37))


def save_published(prepared: RunPaths, folder: Path) -> None:
    """Write the training pictures as MLCommons publishes the cleaned CC12M: Hugging Face's Image and text."""
    import datasets

    datasets.disable_progress_bars()
    tars = TarImages(prepared.data / "train")
    rows = {
        "png": [png(small_image(index)) for index in range(len(tars))],
        "txt": [tars.caption(index) for index in range(len(tars))],
        "__key__": [tars.key(index) for index in range(len(tars))],
        "width": [32] * len(tars),
    }
    made = datasets.Dataset.from_dict(rows).cast_column("png", datasets.Image())
    made.save_to_disk(str(folder), num_shards=2)


def test_pictures_as_mlcommons_publishes_them_are_those_of_the_tars(
    prepared: RunPaths, tmp_path: Path
) -> None:
    save_published(prepared, tmp_path / "train")
    from_arrow = training(raw_run(data={"num_workers": 2}), tmp_path)
    from_tars = training(raw_run(), prepared.data)
    for ours, theirs in zip(from_arrow, from_tars, strict=True):
        assert isinstance(ours, ImageBatch)
        assert isinstance(theirs, ImageBatch)
        assert torch.equal(ours.images, theirs.images)
        assert (ours.captions, ours.faults) == (theirs.captions, ())


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"png": ["text"], "title": ["a"]}, "columns png and txt are needed; it has png, title"),
        ({"png": [3], "txt": ["a"]}, "column 'png' is int64, not an image's bytes"),
    ],
)
def test_streams_without_pictures_are_refused(
    tmp_path: Path, columns: dict[str, Any], words: str
) -> None:
    save_stream(tmp_path / "train" / "a.arrow", pa.table(columns))
    with pytest.raises(DataError, match=words):
        next(training(raw_run(), tmp_path))


def test_damaged_streams_of_pictures_are_refused_or_their_samples_named(
    prepared: RunPaths, tmp_path: Path
) -> None:
    save_published(prepared, tmp_path / "train")
    path, rng = tmp_path / "train/data-00000-of-00002.arrow", np.random.default_rng(0)
    content, refused = path.read_bytes(), 0
    for _ in range(60):
        bad = bytearray(content)
        for place in rng.integers(0, 4000, 8):  # where the schema and the offsets are
            bad[place] = rng.integers(0, 256)
        path.write_bytes(bad)
        try:
            next(training(raw_run(), tmp_path))
        except DataError:
            refused += 1
    assert refused > 0


def test_an_unreadable_picture_weighs_nothing_and_moves_nothing(
    prepared: RunPaths, tmp_path: Path
) -> None:
    shutil.copytree(prepared.data / "train", tmp_path / "train")
    run = raw_run(data={"max_bad_fraction": 0.5})
    path = tmp_path / "train/shard_000000.tar"
    content = bytearray(path.read_bytes())
    place = content.index(b"IDAT", content.index(b"000000007.png"))
    content[place : place + 40] = bytes(40)
    path.write_bytes(content)
    good = list(training(run, prepared.data))
    bad = list(training(run, tmp_path))
    faults = [fault for batch in bad for fault in batch.faults]
    named = {fault.partition(" key ")[2][:25] for fault in faults}
    assert named == {"'000000007': its image is"}
    for mine, its in zip(good, bad, strict=True):
        hit = its.indices == 7
        assert torch.equal(its.weights, (~hit).float())
        assert torch.equal(mine.images[~hit], its.images[~hit])
        assert torch.equal(mine.noise, its.noise)


# Configuration


@pytest.mark.parametrize(("layout", "slow"), [("parquet", True), ("arrow", False)])
def test_who_trains_from_parquet_is_told_to_convert(
    prepared: RunPaths,
    tmp_path: Path,
    layout: Layout,
    slow: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = RunPaths(tmp_path, prepared.data, prepared.models)
    check_before_starting(encoded_run(layout), paths, 1)
    assert ("parquet has no random access" in capsys.readouterr().err) == slow


def test_a_run_on_pictures_needs_latents_of_their_size() -> None:
    with pytest.raises(ConfigError, match="must be image_size / 8 if source is images"):
        config(data={"latent_size": 8})


def test_the_preprocess_task_needs_pictures() -> None:
    with pytest.raises(ConfigError, match=r"data\.source.*must be images if task is preprocess"):
        resolve({"preset": "mlperf-schnell", "task": "preprocess"})
