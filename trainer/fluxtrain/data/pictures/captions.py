"""Captions of pictures: text files beside them, or a metadata file as Hugging Face's imagefolder has it."""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from fluxtrain.data.tar.members import open_regular
from fluxtrain.errors import DataError

EXTENSIONS = (".txt", ".caption")
METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
COLUMNS = ("text", "caption", "prompt")
"""Columns of a metadata file that hold the caption: the first of them that there is."""
_FILE = "file_name"
_MAX_CAPTION_BYTES = 1 << 16
_MAX_METADATA_BYTES = 1 << 28
"""Of a metadata file: a million captions of 250 letters."""
_MAX_ROW = 1 << 20
"""Characters of a row."""


class CaptionError(ValueError):
    """A caption cannot be used; the message says why."""


def read_caption(path: Path) -> str:
    """Return the caption in the text file ``path`` on one line; CaptionError if it is not text."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_CAPTION_BYTES + 1)
    except OSError as error:
        raise CaptionError(f"its caption {path.name} cannot be read ({error.strerror})") from None
    if len(content) > _MAX_CAPTION_BYTES:
        raise CaptionError(f"its caption {path.name} has more than {_MAX_CAPTION_BYTES} bytes")
    is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = content.decode("utf-16" if is_utf16 else "utf-8-sig")
    except UnicodeDecodeError:
        raise CaptionError(f"its caption {path.name} is not UTF-8") from None
    if "\0" in text:
        raise CaptionError(f"its caption {path.name} is not text")
    return one_line(text)


def one_line(text: str) -> str:
    """Return ``text`` with each run of white space as one space."""
    return " ".join(text.split())


def find_metadata(folder: Path) -> Path | None:
    """Return the metadata file of ``folder``, None if it has none; DataError if it has several."""
    found = [folder / name for name in METADATA if (folder / name).is_file()]
    if len(found) > 1:
        names = " and ".join(path.name for path in found)
        raise DataError(f"{folder}: has {names}; keep one of them")
    return found[0] if found else None


def read_metadata(path: Path) -> dict[str, str]:
    """Return the captions in the metadata file ``path`` by file name, "" where a row has none.

    Raises DataError, with the line, if a row is malformed, or names a file twice or outside of the folder.
    """
    captions = dict[str, str]()
    for number, row in enumerate(_rows(path), 1):
        name = row.get(_FILE)
        if not isinstance(name, str) or not name:
            columns = ", ".join(map(str, row))[:100]
            raise DataError(f"{path}: row {number} has no {_FILE}; it has {columns}")
        if not name.isprintable():
            text = f"{name!a:.100} has characters that cannot be printed"
            raise DataError(f"{path}: row {number}: {text}")
        key = Path(name).as_posix()
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise DataError(f"{path}: row {number}: {name!r:.100} is outside of the folder")
        if key in captions:
            raise DataError(f"{path}: row {number}: {name!r:.100} comes twice")
        captions[key] = _caption(path, number, row)
    if not captions:
        raise DataError(f"{path}: has no rows")
    return captions


def _caption(path: Path, number: int, row: dict[str, Any]) -> str:
    column = next((name for name in COLUMNS if name in row), None)
    if column is None:
        text = f"row {number} has none of the columns {', '.join(COLUMNS)}"
        raise DataError(f"{path}: {text}; it has {', '.join(map(str, row))[:100]}")
    text = row[column]
    if text is not None and not isinstance(text, str):
        raise DataError(f"{path}: row {number}: {column} is {text!r:.40}, not a text")
    if len(text or "") > _MAX_CAPTION_BYTES:
        raise DataError(f"{path}: row {number}: {column} has more than {_MAX_CAPTION_BYTES} bytes")
    return one_line(text or "")


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        if path.stat().st_size > _MAX_METADATA_BYTES:
            raise DataError(f"{path}: has more than {_MAX_METADATA_BYTES} bytes")
        if path.suffix == ".parquet":
            yield from _parquet_rows(path)
            return
        is_csv = path.suffix == ".csv"
        with (
            open_regular(path) as file,
            open(file, encoding="utf-8-sig", newline="" if is_csv else "\n", closefd=False) as text,
        ):
            lines = _Lines(path, text)
            yield from _csv_rows(path, lines) if is_csv else _json_rows(path, lines)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: is not UTF-8") from None


class _Lines:
    """The lines of a metadata file, of which those of one row are bounded together."""

    def __init__(self, path: Path, text: TextIO) -> None:
        self._path, self._text = path, text
        self.number, self.left = 0, _MAX_ROW

    def __iter__(self) -> Iterator[str]:
        while line := self._text.readline(self.left + 1):
            self.number += 1
            self.left -= len(line)
            if self.left < 0:
                text = f"line {self.number}: a row has more than {_MAX_ROW} characters"
                raise DataError(f"{self._path}: {text}")
            yield line


def _json_rows(path: Path, lines: _Lines) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        lines.left = _MAX_ROW
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: line {number} is not JSON ({error})") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}: line {number} is not a JSON object")
        yield row


def _csv_rows(path: Path, lines: _Lines) -> Iterator[dict[str, Any]]:
    try:
        reader = csv.DictReader(lines, strict=True)
        for row in reader:
            lines.left = _MAX_ROW
            if None in row or None in row.values():
                more = "more" if None in row else "fewer"
                text = f"line {reader.line_num} has {more} fields than the header"
                raise DataError(f"{path}: {text}; a caption with commas is in double quotes")
            yield row
    except csv.Error as error:
        raise DataError(f"{path}: is not CSV ({error})") from None


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    from fluxtrain.data.pictures.parquet_captions import (
        read_rows,  # pyarrow takes a while to import
    )

    yield from read_rows(path, (_FILE, *COLUMNS))
