"""Damaged files of every layout raise DataError naming the file; a bad cell is a fault of its sample."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.trainer.data.formats.encoded_sets import (
    BAD_CELLS,
    FOREIGN,
    read,
    sample,
    save_stream,
    save_with_mean,
    table,
    write,
)

from fluxtrain.contract.run.data import Layout
from fluxtrain.data.formats.convert import open_encoded
from fluxtrain.errors import DataError


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
