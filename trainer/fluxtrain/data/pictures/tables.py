"""Pictures in Parquet files, as Hugging Face's data sets have them, written out as a folder of pictures.

A file is validated before it is read (`check_pages`), and read a few rows at a time.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fluxtrain.contract.run.table import TableConfig
from fluxtrain.data.pictures.captions import COLUMNS
from fluxtrain.data.pictures.faults import Faults
from fluxtrain.data.pictures.picture import MAX_BYTES
from fluxtrain.errors import ConfigError, DataError

TABLE = ".parquet"
_AT = "spec.run.data.table"
_ROWS_AT_ONCE = 16
_MAX_CAPTION = 1 << 16
_SPLITS = ("train", "test", "validation", "valid", "val", "dev")
_SIGNATURES = (
    *((b"\x89PNG", ".png"), (b"\xff\xd8", ".jpg"), (b"GIF8", ".gif"), (b"BM", ".bmp")),
    *((b"II*\0", ".tif"), (b"MM\0*", ".tif")),
)


def files_of_split(names: Sequence[str], split: str | None) -> set[str]:
    """Return those of the files ``names`` that belong to ``split``; None is the training set.

    Raises ConfigError if there are none.
    """
    found = {each: {name for name in names if _is_of(name, each)} for each in _SPLITS}
    if split is None:
        return found["train"] or set(names).difference(*found.values()) or set(names)
    chosen = {name for name in names if _is_of(name, split)}
    if not chosen:
        there = ", ".join(each for each, files in found.items() if files) or "no split in the names"
        raise ConfigError(f"{_AT}.split", split, f"no file is of it; there are {there}")
    return chosen


def write_out(
    path: Path, folder: Path, table: TableConfig, check: Callable[[], object] = lambda: None
) -> None:
    """Write pictures and captions of the Parquet file ``path`` to ``folder``, whole or not at all.

    ``check`` is called for each row; what it raises ends the work.
    Raises DataError if the file is damaged, ConfigError if it lacks a column.
    """
    if folder.exists():
        return
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    faults, count = Faults(), 0
    for number, (picture, caption) in enumerate(_rows(path, table)):
        check()
        fault = _fault(picture, caption)
        if fault:
            faults.add(f"row {number}", fault)
            continue
        _write(partial / f"{number:08d}{_suffix(picture)}", picture)
        if caption:
            _write(partial / f"{number:08d}.txt", caption.encode("utf-8", "replace"))
        count += 1
    if not count:
        faults.add("", f"holds no pictures{faults.example()}")
    faults.write(partial)
    partial.rename(folder)


def _is_of(name: str, split: str) -> bool:
    pattern = rf"(^|[/_.-]){re.escape(split)}([/_.-]|\d|$)"
    return re.search(pattern, name.removesuffix(TABLE)) is not None


def _rows(path: Path, table: TableConfig) -> Iterator[tuple[Any, Any]]:
    """Yield the bytes of the picture and the caption of each row; either may be anything."""
    import pyarrow as pa  # these take a while to import
    import pyarrow.parquet as pq

    from fluxtrain.data.layouts.arrow import short_message
    from fluxtrain.data.layouts.parquet_pages import CONTAINER_LIMIT, check_pages

    try:
        check_pages(path, [])
        schema = pq.read_schema(path)
        image, caption = _image_column(schema, table), _caption_column(schema, table)
        columns = [image, caption] if caption else [image]
        check_pages(path, [*columns, (image, "bytes"), (image, "path")])
        file = pq.ParquetFile(path, thrift_container_size_limit=CONTAINER_LIMIT)
        for batch in file.iter_batches(_ROWS_AT_ONCE, columns=columns, use_threads=False):
            batch.validate(full=True)
            texts = batch[caption].to_pylist() if caption else [None] * len(batch)
            for picture, text in zip(batch[image].to_pylist(), texts, strict=True):
                yield (picture.get("bytes") if isinstance(picture, dict) else picture), text
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path.name}: is not Parquet ({short_message(error)})") from None


def _image_column(schema: Any, table: TableConfig) -> str:
    found = [field.name for field in schema if _has_bytes(field.type)]
    if table.image_column is None and found:
        return str(found[0])
    if table.image_column in found:
        return str(table.image_column)
    text = f"no such column holds bytes; there are {_names(schema)}"
    raise ConfigError(f"{_AT}.image_column", table.image_column, text)


def _caption_column(schema: Any, table: TableConfig) -> str | None:
    if table.caption_column is None:
        return next((name for name in COLUMNS if name in schema.names), None)
    if table.caption_column in schema.names:
        return table.caption_column
    text = f"there is no such column; there are {_names(schema)}"
    raise ConfigError(f"{_AT}.caption_column", table.caption_column, text)


def _has_bytes(kind: Any) -> bool:
    from pyarrow import types

    if types.is_struct(kind):
        return any(field.name == "bytes" and _has_bytes(field.type) for field in kind)
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _names(schema: Any) -> str:
    return ", ".join(f"{field.name} ({str(field.type)[:40]})" for field in schema)[:300]


def _fault(picture: Any, caption: Any) -> str | None:
    if not isinstance(picture, bytes) or not picture:
        return "it has no bytes of a picture"
    if len(picture) > MAX_BYTES:
        return f"its picture has more than {MAX_BYTES:,} bytes"
    if not _suffix(picture):
        return "no picture in a format that is read (PNG, JPEG, WebP ...)"
    if caption is not None and not isinstance(caption, str):
        return f"its caption is {str(caption)[:40]!r}, not a text"
    if caption and len(caption) > _MAX_CAPTION:
        return f"its caption has more than {_MAX_CAPTION} characters"
    return None


def _suffix(picture: bytes) -> str:
    """Return the suffix of the format of ``picture``, "" if it is none that is read."""
    if picture[:4] == b"RIFF" and picture[8:12] == b"WEBP":
        return ".webp"
    if picture[4:12] == b"ftypavif":
        return ".avif"
    return next((suffix for start, suffix in _SIGNATURES if picture.startswith(start)), "")


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    os.utime(path, ns=(0, 0))  # equal on all nodes: pictures are known by it
