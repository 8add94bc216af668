"""Pictures in tars and tables, base models and other trainers' files that claim far more than their bytes."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from tests.trainer.bombs.limited import Make
from tests.trainer.bombs.tables import MIB, safetensors
from tests.trainer.picture_cache.folders import file_of

from fluxtrain.contract.run.data import TableConfig
from fluxtrain.data.order import Placement
from fluxtrain.data.pictures.picture import PictureError, mask_of
from fluxtrain.data.pictures.tables import unpack, write_out
from fluxtrain.errors import DataError
from fluxtrain.imports.files import import_file
from fluxtrain.weights.reader import open_weights


def unpacked(path: Path) -> object:
    return unpack(path, path.parent / "out")


def written_out(path: Path) -> object:
    return write_out(path, path.parent / "out", TableConfig())


def base_model(path: Path) -> object:
    return open_weights(path).shapes


def imported(path: Path) -> object:
    return import_file(path, {})


def mask(path: Path) -> object:
    try:
        return mask_of(path.read_bytes(), "folder", (1, 1), Placement((512, 512), (512, 512)))
    except PictureError as error:
        raise DataError(f"{path.name}: {error}") from None


def table(cells: Callable[[], list[Any]], **options: Any) -> Make:
    """Return what writes a table of pictures; ``cells`` makes them, in the child."""

    def make(folder: Path) -> Path:
        path = folder / "a.parquet"
        given = pa.table({"image": pa.array([{"bytes": cell} for cell in cells()])})
        pq.write_table(given, path, compression="zstd", **options)
        return path

    return make


def zeros() -> list[Any]:
    """Return one cell of 80 MiB of zeros."""
    return [bytes(80 * MIB)]


def one_picture() -> list[Any]:
    """Return the same picture 4,000 times, 250 MiB."""
    return [file_of(Image.new("RGB", (148, 148)), "BMP")] * 4000


def many_tensors(folder: Path) -> Path:
    """Write a header of 12,000 tensors without values."""
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    return safetensors(folder, {f"double_blocks.{n}.a": entry for n in range(12_000)})


def tuner(folder: Path) -> Path:
    """Write SimpleTuner's options with 2 million lists."""
    lists = "[" + "[]," * 2_000_000 + "[]]"
    (folder / "a.json").write_text(f'{{"model_family": "flux", "max_train_steps": {lists}}}')
    return folder / "a.json"


def caption_in_json(folder: Path) -> Path:
    """Write a tar whose JSON has 256 MiB, which take no space, beside a picture."""
    with (folder / "a.tar").open("wb") as file:
        for name, size in (("a.json", 1 << 28), ("a.png", 512)):
            header = tarfile.TarInfo(name)
            header.size = size
            file.write(header.tobuf())
            file.seek(size, 1)
        file.write(bytes(1024))
    return folder / "a.tar"


def many_sets(folder: Path) -> Path:
    """Write kohya's data sets of 40,000 tables."""
    text = "[[datasets]]\n" * 40_000
    (folder / "a.toml").write_text(text + json.dumps("x") + " = 1\n")
    return folder / "a.toml"
