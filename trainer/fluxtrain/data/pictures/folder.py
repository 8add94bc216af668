"""Finds the pictures of a folder and their captions; nothing is decoded."""

from __future__ import annotations

import codecs
import csv
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from os.path import realpath
from pathlib import Path
from typing import Any, TextIO

from fluxtrain.data.formats.tar import open_regular
from fluxtrain.errors import DataError

SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp"),
    *(".bmp", ".gif", ".tif", ".tiff", ".avif"),
)
_OTHER_SUFFIXES = (
    *(".heic", ".heif", ".jxl", ".jp2", ".svg", ".psd", ".ico", ".tga", ".exr", ".hdr", ".eps"),
    *(".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".raf"),
    *(".mp4", ".mov", ".avi", ".mkv", ".webm"),
)
"""Pictures and films that are not read: they are listed, other files are not looked at."""
_OUT = "is a link that leads out of {}; copy the file"


@dataclass(frozen=True)
class PictureFile:
    """One file of a folder that is a picture by its name."""

    name: str
    """Path below the folder, with slashes."""
    size: int
    """Bytes."""
    modified: int
    """Nanoseconds since 1970."""
    caption: str
    """"" if the picture has none."""


@dataclass(frozen=True)
class Listing:
    """The pictures of a folder in the order of their names, and the files that cannot be used."""

    folder: Path
    pictures: list[PictureFile]
    skipped: dict[str, str] = field(default_factory=dict)
    """Names with the reason."""
    masks: dict[str, PictureFile] = field(default_factory=dict)
    """Masks of the loss by the names of their pictures, in a folder of their own."""
    is_streamed: bool = False
    """Whether the files are not in ``folder``: they are there while they are encoded."""

    @property
    def without_caption(self) -> list[str]:
        """Return the names of the pictures that have no caption."""
        return [picture.name for picture in self.pictures if not picture.caption]


def list_pictures(
    folder: Path,
    hint: str = "",
    root: Path | None = None,
    absent: Mapping[str, int] | None = None,
    may_be_empty: bool = False,
) -> Listing:
    """Return the pictures in ``folder`` and the folders below it; names that begin with a dot are left out.

    So are contact sheets under their usual name.
    Links lead to files below ``root``, which is ``folder`` unless that is below it; others are skipped.
    Pictures that are ``absent``, names with bytes, are listed as if they were there, beside their captions.
    Raises DataError, which ends with ``hint``, if there are none, unless it ``may_be_empty``, or if the
    metadata file is malformed.
    """
    if not folder.is_dir():
        text = "is not a folder" if folder.exists() else "missing"
        raise DataError(f"{folder}: {text}; it should hold pictures{hint}")
    root = root if root and folder.resolve().is_relative_to(root.resolve()) else folder
    absent = absent or {}
    names, skipped = _names(folder, absent), dict[str, str]()
    metadata = find_metadata(folder)
    if metadata is not None and _leads_out(metadata, root):
        raise DataError(f"{metadata}: {_OUT.format(root)}")
    captions = {} if metadata is None else read_metadata(metadata)
    pictures = list[PictureFile]()
    for name in names:
        suffix = Path(name).suffix.lower()
        if not name.isprintable():  # it could not be written down
            skipped[ascii(name)] = "its name has characters that cannot be printed"
        elif suffix in _OTHER_SUFFIXES:
            skipped[name] = f"{suffix} is not read; convert it to PNG, JPEG or WebP"
        elif suffix in SUFFIXES:
            try:
                pictures.append(_picture(folder, name, captions, root, absent.get(name)))
            except CaptionError as error:
                skipped[name] = str(error)
            except OSError as error:
                skipped[name] = error.strerror or "cannot be read"
    known = {picture.name for picture in pictures} | skipped.keys()
    skipped |= {
        name: "the metadata file names it, but it is missing" for name in captions.keys() - known
    }
    if not pictures and not skipped and not may_be_empty:
        raise DataError(f"{folder}: holds no pictures ({', '.join(SUFFIXES)}){hint}")
    return Listing(folder, pictures, dict(sorted(skipped.items())))


def in_order(name: str) -> list[tuple[bool, str]]:
    """Return a key that sorts names as they are listed: the files of a folder, then those below it."""
    *folders, last = name.split("/")
    return [*((True, folder) for folder in folders), (False, last)]


def _names(folder: Path, absent: Mapping[str, int]) -> list[str]:
    """Return the names of the files in ``folder``, and of those that are ``absent``, in their order."""
    there = list(_walk(folder))
    if not absent:
        return there
    seen = [
        n for n in absent if not any(p.startswith((".", "__MACOSX")) for p in n.split("/")[:-1])
    ]
    return sorted({*there, *seen}, key=in_order)


def _walk(folder: Path) -> Iterator[str]:
    """Yield the names of all files below ``folder`` in a fixed order."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror})")

    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__MACOSX")))
        below = Path(parent).relative_to(folder)
        for name in sorted(files):
            if not name.startswith(".") and not is_sheet_among_pictures(Path(parent) / name):
                yield (below / name).as_posix()


def _picture(
    folder: Path, name: str, captions: dict[str, str], root: Path, size: int | None
) -> PictureFile:
    """Return the picture ``name``, which is absent if its ``size`` is given."""
    path = folder / name
    for each in (path, *texts_beside(path)):
        if _leads_out(each, root):
            raise CaptionError(f"{'' if each == path else each.name + ' '}{_OUT.format(root)}")
    if size is not None:
        return PictureFile(name, size, 0, captions.get(name) or _caption_beside(path))
    status = path.stat()
    if not path.is_file():
        raise CaptionError("is not a regular file")
    caption = captions.get(name) or _caption_beside(path)
    return PictureFile(name, status.st_size, status.st_mtime_ns, caption)


def _caption_beside(path: Path) -> str:
    """Return the caption in a text file beside the picture ``path``, "" if there is none."""
    return next(filter(None, map(read_caption, texts_beside(path))), "")


def _leads_out(path: Path, root: Path) -> bool:
    """Return whether ``path`` is a link to a file that is not below ``root``."""
    return path.is_symlink() and not Path(realpath(path)).is_relative_to(realpath(root))


def texts_beside(path: Path) -> Iterator[Path]:
    """Yield the text files beside the picture ``path``, of which the first with a caption is used."""
    for extension in (*EXTENSIONS, *map(str.upper, EXTENSIONS)):
        if (beside := path.with_suffix(extension)).is_file():
            yield beside


# The mark by which a contact sheet that was drawn of pictures is told from the pictures.


FILE = "contact-sheet.png"
"""Name of a contact sheet, if no other is given; in a folder of pictures it must have this one."""
MARK = ("Software", "fluxtrain contact sheet")
"""Text field of the PNG."""
_HEAD_BYTES = 1024


def is_contact_sheet(path: Path) -> bool:
    """Return whether the file ``path`` has the MARK; nothing is decoded.

    Raises OSError if it is unreadable.
    """
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    chunk = b"tEXt" + "\0".join(MARK).encode()
    return head.startswith(b"\x89PNG\r\n\x1a\n") and chunk in head


def is_sheet_among_pictures(path: Path) -> bool:
    """Return whether ``path``, a file of a folder of pictures, is a contact sheet, and no picture.

    Only files of the usual name are opened.
    """
    try:
        return path.name == FILE and is_contact_sheet(path)
    except OSError:  # whoever lists it says what is wrong
        return False


# Captions of pictures: text files beside them, or a metadata file as Hugging Face's imagefolder has
# it.


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
    from fluxtrain.data.pictures.tables import read_rows

    yield from read_rows(path, (_FILE, *COLUMNS))


# What was left out of shards and tables, kept beside the pictures that were written out of them.


FAULTS = ".faults.json"
_MOST = 1000


class Faults:
    """Names with the reason, of which the first are kept."""

    def __init__(self) -> None:
        """Begin without any."""
        self.first: dict[str, str] = {}
        self._more = 0

    def add(self, name: str, reason: str) -> None:
        """Keep ``name``, or count it if there are many."""
        if len(self.first) < _MOST:
            self.first[name] = reason
        else:
            self._more += 1

    def example(self) -> str:
        """Return the end of a message, with the first of them."""
        first = next(iter(self.first.items()), None)
        return f"; {': '.join(first)}" if first else ""

    def write(self, folder: Path) -> None:
        """Write them to ``folder``, if there are some."""
        more = {"…": f"{self._more} more were left out"} if self._more else {}
        if self.first:
            (folder / FAULTS).write_text(json.dumps(self.first | more))


def read_faults(folder: Path) -> dict[str, str]:
    """Return what was left out of all shards and tables in ``folder``, with the reason."""
    found = dict[str, str]()
    for path in folder.glob(f"*/{FAULTS}"):
        faults = json.loads(path.read_text())
        found |= {f"{path.parent.name}/{name}": reason for name, reason in faults.items()}
    return dict(sorted(found.items()))
