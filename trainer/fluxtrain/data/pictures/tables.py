"""Pictures in Parquet files and WebDataset tars, written out as a folder before they are encoded.

A Parquet file is validated before it is read (`check_pages`), and read a few rows at a time. Of a tar
the headers are validated first: links, huge or unnamed members and names that lead out of it are left
out, and one that is cut off is refused; then the webdataset library reads it, once, from start to end.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fluxtrain.contract.run.data import TableConfig
from fluxtrain.data.formats.arrow import short_message
from fluxtrain.data.formats.parquet import shared_values
from fluxtrain.data.formats.parquet_pages import CONTAINER_LIMIT, check_pages
from fluxtrain.data.formats.tar import Member, quoted, read_members
from fluxtrain.data.formats.tar_index import MAX_CAPTION_BYTES, MAX_METADATA_BYTES, split_name
from fluxtrain.data.pictures.encodings import shown, text_of
from fluxtrain.data.pictures.faults import EMPTY, LEFT_OUT, Faults, read_faults
from fluxtrain.data.pictures.folder import (
    COLUMNS,
    SUFFIXES,
    Listing,
    PictureFile,
    hidden_reason,
    in_order,
    is_hidden,
    json_caption,
    list_pictures,
    suffix_fault,
)
from fluxtrain.data.pictures.picture import MAX_BYTES
from fluxtrain.errors import ConfigError, DataError
from fluxtrain.runtime.files import atomic_write_by_several, write_to_disk

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
    path: Path,
    folder: Path,
    table: TableConfig,
    check: Callable[[], object] = lambda: None,
    encoding: str = "utf-8",
) -> None:
    """Write pictures and captions of the Parquet file ``path`` to ``folder``, whole or not at all.

    ``check`` is called for each row; what it raises ends the work. Captions that are bytes are of
    ``encoding``.
    Raises DataError if the file is damaged, ConfigError if it lacks a column.
    """

    def fill(partial: Path, faults: Faults) -> int:
        count = 0
        for number, (picture, caption) in enumerate(_rows(path, table)):
            check()
            if fault := _picture_fault(picture):
                faults.add(f"row {number}", fault)
                continue
            try:
                text = text_of(caption, encoding) if isinstance(caption, bytes) else caption
            except UnicodeError:
                faults.add(f"row {number}", f"its caption is not {shown(encoding)}", caption)
                continue
            if fault := _caption_fault(text):
                faults.add(f"row {number}", fault)
                continue
            _write_file(partial / f"{number:08d}{_suffix(picture)}", picture)
            if caption:
                _write_file(partial / f"{number:08d}.txt", text.encode("utf-8-sig", "replace"))
            count += 1
        return count

    _write_whole(folder, fill)


def _write_whole(folder: Path, fill: Callable[[Path, Faults], int]) -> None:
    """Let ``fill`` write ``folder`` unless it exists; it notes what it leaves out, and counts pictures."""
    if folder.exists():
        return
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    faults = Faults()
    if not fill(partial, faults):
        faults.add("", f"{EMPTY}{faults.example()}")
    faults.write(partial)
    partial.rename(folder)


def _is_of(name: str, split: str) -> bool:
    pattern = rf"(^|[/_.-]){re.escape(split)}([/_.-]|\d|$)"
    return re.search(pattern, name.removesuffix(TABLE)) is not None


def _rows(path: Path, table: TableConfig) -> Iterator[tuple[Any, Any]]:
    """Yield the bytes of the picture and the caption of each row; either may be anything."""
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


def _picture_fault(picture: Any) -> str | None:
    if not isinstance(picture, bytes) or not picture:
        return "it has no bytes of a picture"
    if len(picture) > MAX_BYTES:
        return f"its picture has more than {MAX_BYTES:,} bytes"
    if not _suffix(picture):
        return "no picture in a format that is read (PNG, JPEG, WebP ...)"
    return None


def _caption_fault(caption: Any) -> str | None:
    if caption is not None and not isinstance(caption, str):
        return f"its caption is {str(caption)[:40]!r}, not a text"
    if caption and len(caption) > _MAX_CAPTION:
        return f"its caption has more than {_MAX_CAPTION} characters"
    return None


def _suffix(picture: bytes) -> str:
    if picture[:4] == b"RIFF" and picture[8:12] == b"WEBP":
        return ".webp"
    if picture[4:12] == b"ftypavif":
        return ".avif"
    return next((suffix for start, suffix in _SIGNATURES if picture.startswith(start)), "")


SHARD = ".tar"
_PICTURES = {suffix[1:] for suffix in SUFFIXES}
_LIMITS = {"txt": MAX_CAPTION_BYTES, "caption": MAX_CAPTION_BYTES, "json": MAX_METADATA_BYTES}
_MAX_PART = 200
"""Most bytes of one part of a name, of 255 that file systems allow."""


def unpack(
    tar: Path, folder: Path, check: Callable[[], object] = lambda: None, encoding: str = "utf-8"
) -> None:
    """Write pictures and captions of ``tar`` to ``folder``, whole or not at all; it may exist already.

    ``check`` is called for each sample; what it raises ends the work. Captions in JSON are of ``encoding``.
    Raises DataError if the tar is not whole.
    """

    def fill(partial: Path, faults: Faults) -> int:
        count = 0
        for sample in _samples(tar, _accepted(tar, faults)):
            check()
            count += _write(sample, partial, faults, encoding)
        return count

    _write_whole(folder, fill)


def _accepted(tar: Path, faults: Faults) -> set[str]:
    """Return the names of the members that are read; note pictures that are not in ``faults``."""
    names, seen, parts = set[str](), set[tuple[str, str]](), dict[str, str]()
    for member in read_members(tar):
        key, suffix = split_name(member.name)
        fault = member.fault or _fault(member, key, suffix)
        if fault is None and key and (key, suffix) in seen:
            fault = "there are several of this name"
        *folders, last = member.name.split("/")
        hidden = next(filter(is_hidden, [*folders, last]), None)
        # what has no fault is written: the listing names the folder
        is_below = any(map(is_hidden, folders))
        if hidden and bool(fault) == is_below:
            faults.leave_out(quoted(member.name), hidden_reason(hidden))
        elif fault and key and suffix not in _PICTURES and suffix not in _LIMITS:
            parts[member.name] = fault
        elif fault:
            faults.add(quoted(member.name), fault)
        elif suffix in _PICTURES or suffix in _LIMITS:
            seen.add((key, suffix))
            names.add(member.name)
    keys = {key for key, suffix in map(split_name, names) if suffix in _PICTURES}
    for name, fault in parts.items():  # such as masks beside the pictures
        keep = faults.leave_out if split_name(name)[0] in keys else faults.add
        keep(quoted(name), fault)
    return names


def _fault(member: Member, key: str, suffix: str) -> str | None:
    limit = _LIMITS.get(suffix)
    if limit is not None and member.size > limit:
        return f"it has {member.size} bytes, at most {limit} are read"
    if suffix in _PICTURES and not key:
        return "it has no name before its suffix"
    last = suffix.rpartition(".")[2]
    if key and (other := suffix_fault(f".{last}")):
        return other
    if key and suffix not in _PICTURES and last in _PICTURES:
        return f"a sample's name ends at its first dot, so this is its part .{suffix}, which is not read"
    if any(len(part.encode("utf-8", "replace")) > _MAX_PART for part in member.name.split("/")):
        return f"a part of its name has more than {_MAX_PART} bytes"
    return None


def _samples(tar: Path, accepted: set[str]) -> Iterator[dict[str, Any]]:
    """Yield the samples of ``tar`` as webdataset groups its members, of which each is read once."""
    from webdataset import tariterators  # takes a while to import

    remaining = set(accepted)

    def select(name: str) -> bool:
        name = name.removeprefix("./")
        is_first = name in remaining
        remaining.discard(name)
        return is_first

    with tar.open("rb") as stream:
        source = [{"url": tar.name, "stream": stream}]
        members = tariterators.tar_file_expander(source, select_files=select)
        yield from tariterators.group_by_keys(members, handler=lambda error: True)


def _write(sample: dict[str, Any], folder: Path, faults: Faults, encoding: str) -> int:
    """Write the picture of ``sample`` and its caption; return the number of pictures.

    Members of a sample that do not follow each other come as several samples of the same name.
    """
    key = str(sample["__key__"]).removeprefix("./")
    first, *others = [suffix for suffix in sample if suffix in _PICTURES] or [""]
    for suffix in others:
        faults.add(quoted(f"{key}.{suffix}"), f"the sample has a picture .{first} already")
    try:
        caption = _caption(sample, encoding)
    except ValueError as error:
        is_undecoded = isinstance(error, UnicodeError)
        fault = f"is not {shown(encoding)}" if is_undecoded else str(error)
        content = bytes(sample["json"]) if is_undecoded else b""
        name = quoted(f"{key}.{first or 'json'}")
        faults.add(name, f"the caption in its JSON {fault}", content)
        return 0
    try:
        if first:
            _write_file(folder / f"{key}.{first}", sample[first])
        if caption is not None:
            _write_file(folder / f"{key}.txt", caption)
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        faults.add(quoted(f"{key}.{first}"), "its name is that of a folder too")
        return 0
    return 1 if first else 0


def _write_file(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, ns=(0, 0))  # equal on all nodes: pictures are known by it


def _caption(sample: dict[str, Any], encoding: str) -> bytes | None:
    """Return the caption of ``sample``, of a text member or of its JSON, as a file.

    Raises UnicodeError if the JSON is of another codec, ValueError if it has another fault.
    """
    for suffix in ("txt", "caption"):
        if suffix in sample:
            return bytes(sample[suffix])
    text = json_caption(bytes(sample.get("json", b"{}")), encoding)
    return None if text is None else text.encode("utf-8-sig", "replace")


@dataclass(frozen=True)
class ShardListing:
    """The pictures of one shard, which is unpacked into a folder of its own."""

    pictures: tuple[PictureFile, ...]
    skipped: dict[str, str]
    """Files of its folder that are not used, with the reason."""
    faults: dict[str, str]
    """What was left out when it was unpacked, with the reason."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Files of both kinds that are no pictures of the user's."""

    def write(self, path: Path) -> None:
        pictures = [[each.name, each.size, each.caption] for each in self.pictures]
        with atomic_write_by_several(path) as partial:
            write_to_disk(
                partial, json.dumps({**vars(self), "pictures": pictures}, ensure_ascii=False)
            )


def list_shard(folder: Path, encoding: str) -> ShardListing:
    """Return what is in ``folder``, into which a shard was unpacked, with its captions in ``encoding``."""
    faults, others = read_faults(folder), read_faults(folder, LEFT_OUT)
    listing = list_pictures(folder, may_be_empty=bool(faults), encoding=encoding)
    left_out = listing.left_out | others
    return ShardListing(tuple(listing.pictures), listing.skipped, faults, left_out)


def read_listing(path: Path) -> ShardListing | None:
    """Return what was written to ``path``; None if there is nothing, or it is damaged."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        pictures = (PictureFile(name, size, 0, text) for name, size, text in values["pictures"])
        reasons = values["skipped"], values["faults"], values.get("left_out", {})
        return ShardListing(tuple(pictures), *map(dict, reasons))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def joined(folder: Path, shards: Iterable[ShardListing]) -> Listing:
    """Return ``shards`` as they are listed if all of them are unpacked in ``folder``."""
    pictures, skipped, faults = list[PictureFile](), dict[str, str](), dict[str, str]()
    left_out = dict[str, str]()
    for shard in shards:
        pictures += shard.pictures
        skipped |= shard.skipped
        faults |= shard.faults
        left_out |= shard.left_out
    pictures.sort(key=lambda each: in_order(each.name))
    reasons = dict(sorted(skipped.items())) | dict(sorted(faults.items()))
    left_out = dict(sorted(left_out.items()))
    return Listing(folder, pictures, reasons, left_out, is_streamed=True)


_CAPTION_ROWS_AT_ONCE = 1 << 14
_TEXTS = (pa.string(), pa.large_string(), pa.string_view())


def read_rows(path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of ``path`` with those of ``columns`` that it has; equal texts are one object.

    Raises DataError if it is damaged, has other types than texts, or would need much more memory than it has
    bytes.
    """
    try:
        check_pages(path, columns)
        schema = pq.read_schema(path)
        wanted = [name for name in columns if name in schema.names]
        for name in wanted:
            _require_text(path, name, schema.field(name).type)
        file = pq.ParquetFile(
            path, read_dictionary=wanted, thrift_container_size_limit=CONTAINER_LIMIT
        )
        for batch in file.iter_batches(_CAPTION_ROWS_AT_ONCE, columns=wanted, use_threads=False):
            batch.validate(full=True)
            values = [shared_values(pa.chunked_array([batch[name]])) for name in wanted]
            for row in zip(*values, strict=True):
                yield dict(zip(wanted, row, strict=True))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path}: is not Parquet ({short_message(error)})") from None


def _require_text(path: Path, name: str, kind: Any) -> None:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if kind not in _TEXTS and not pa.types.is_null(kind):
        raise DataError(f"{path}: column {name!r} is {str(kind)[:80]}, not a text")
