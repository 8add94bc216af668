"""Readers of pictures in tars and tables, of their masks, and of lists of tars in braces."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from tests.trainer.data.formats.tar_files import TAR_FORMATS, tar
from tests.trainer.fuzz.target import Read, Target
from tests.trainer.picture_cache.folders import file_of

from fluxtrain.contract.run.data import TableConfig
from fluxtrain.data.order import Placement
from fluxtrain.data.pictures.picture import mask_of
from fluxtrain.data.pictures.tables import unpack, write_out
from fluxtrain.fetch.stores import RefusedError, expanded


def targets() -> dict[str, Target]:
    """Return the targets by name."""
    return {
        "picture-tar": Target("a.tar", _unpacked, _tars),
        "picture-table": Target("a.parquet", _written_out, _tables),
        "mask": Target("a.png", _mask("folder"), lambda: [_picture("L"), _picture("RGB")], True),
        "alpha": Target("a.png", _mask("alpha"), lambda: [_picture("RGBA"), _picture("LA")], True),
        "braces": Target("a", _expanded, lambda: [b"s3://a/{00..12}.tar", b"hf://d/{1..3}/a.tar"]),
    }


def _picture(mode: str) -> bytes:
    return file_of(Image.new(mode, (9, 7), "white"), "PNG")


def _tars() -> list[bytes]:
    members = (
        *(("a.png", _picture("RGB")), ("a.json", b'{"text": "a cat"}'), ("b/c.jpg", b"1")),
        *(("b/c.txt", b"c"), ("b.png/d.png", b"1"), ("\u00e9" * 40 + ".webp", b"1")),
    )
    return [tar(*members, form=form) for form in TAR_FORMATS]


def _tables() -> list[bytes]:
    cells = [{"bytes": _picture("RGB"), "path": "a.png"}, {"bytes": b"1", "path": None}]
    found = []
    for images in (cells, [cell["bytes"] for cell in cells]):
        file = io.BytesIO()
        table = pa.table({"image": images, "text": ["a", None]})
        pq.write_table(table, file, write_page_checksum=False)
        found.append(file.getvalue())
    return found


def _unpacked(path: Path) -> object:
    folder = path.parent / "out"
    shutil.rmtree(folder, ignore_errors=True)
    unpack(path, folder)
    return _inside(folder)


def _written_out(path: Path) -> object:
    folder = path.parent / "out"
    shutil.rmtree(folder, ignore_errors=True)
    write_out(path, folder, TableConfig())
    return _inside(folder)


def _inside(folder: Path) -> int:
    """Return the number of files; nothing else may be beside the input."""
    assert {path.name for path in folder.parent.iterdir()} <= {"out", "a.tar", "a.parquet"}
    return sum(1 for path in folder.rglob("*") if path.is_file())


def _mask(kind: str) -> Read:
    placement = Placement((16, 16), (21, 16))
    return lambda path: mask_of(path.read_bytes(), kind, (9, 7), placement)


def _expanded(path: Path) -> object:
    try:
        return len(expanded(path.read_text(errors="replace")))
    except RefusedError:
        return None
