"""Finds the pictures of a folder and their captions, in text files or a metadata file; nothing is decoded."""

from __future__ import annotations

import csv
import json
import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os.path import realpath, splitext
from pathlib import Path
from typing import Any, TextIO

from fluxtrain.data.formats.tar import open_regular
from fluxtrain.data.pictures.encodings import (
    CONTROL,
    EXTENSIONS,
    HEAD_BYTES,
    LIKELY,
    codec_of,
    is_wide,
    likely_codec,
    likely_codecs,
    shown,
    text_of,
)
from fluxtrain.data.pictures.faults import FAULTS, LEFT_OUT, UNREAD_TABLE
from fluxtrain.errors import DataError, has_controls

SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp"),
    *(".bmp", ".gif", ".tif", ".tiff", ".avif"),
)
_OTHER_SUFFIXES = (
    *(".heic", ".heif", ".hif", ".avifs", ".jxl", ".jp2", ".j2k", ".jpx", ".jxr", ".qoi", ".apng"),
    *(".svg", ".psd", ".xcf", ".kra", ".ico", ".tga", ".dds", ".pcx", ".exr", ".hdr", ".eps"),
    *(".ppm", ".pgm", ".pbm", ".pnm"),
    *(".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".raf", ".pef", ".srw"),
    *(".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".wmv", ".mpg", ".mpeg", ".3gp"),
)
"""Pictures and films that are not read: they are listed, other files are not looked at."""
_ARCHIVES = (".zip", ".7z", ".rar", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".zst")
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
    left_out: dict[str, str] = field(default_factory=dict)
    """Files and folders that are no pictures of the user's, such as thumbnails and captions of no picture."""
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
    encoding: str = "utf-8",
) -> Listing:
    """Return the pictures in ``folder`` and the folders below it, with their captions in ``encoding``.

    Names by `is_hidden`, and contact sheets under their usual name, are left out. Links are followed below
    ``root``, which is ``folder`` unless that is below it. A file that is reached twice is listed once.
    Pictures that are ``absent``, names with bytes, are listed as if they were there, beside their captions.
    Raises DataError, which ends with ``hint``, if there are none, unless it ``may_be_empty``, or if the
    metadata file is malformed.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: {no_folder(folder)}; it should hold pictures{hint}")
    root = root if root and folder.resolve().is_relative_to(root.resolve()) else folder
    absent = absent or {}
    tree = _Tree(folder, root)
    metadata = find_metadata(folder)
    if metadata is not None and _leads_out(metadata, root):
        raise DataError(f"{metadata}: {_OUT.format(root)}")
    captions = {} if metadata is None else read_metadata(metadata, encoding)
    seen = (name for name in absent if not _is_below_hidden(name))
    names = sorted({*tree.names, *seen}, key=in_order)
    unused = _unused_texts(names)
    listed, own = {*names}, f"{folder.resolve().name}/"  # with which rows may begin too
    free, others = listed - captions.keys(), captions.keys() - listed
    short = {row: name for row in others if (name := row.removeprefix(own)) in free}
    same = short | similar(names, others - short.keys())
    captions = {same.get(row, row): text for row, text in captions.items()}
    beside = _similar_texts(folder, names, unused)
    pictures, skipped = _pictures(folder, names, captions, root, absent, encoding, beside)
    skipped, left_out = tree.skipped | skipped, tree.left_out | unused
    left_out |= {row: f"{SIMILAR} {name}, whose caption it has" for row, name in same.items()}
    known = {picture.name for picture in pictures} | skipped.keys() | left_out.keys()
    for number, name in enumerate(captions, 1):
        if name not in known:
            kind, why = (left_out, "left out") if _is_below_hidden(name) else (skipped, "missing")
            kind[name] = f"row {number} of the metadata file names it, but it is {why}"
    if not pictures and not skipped and not may_be_empty:
        raise DataError(
            f"{folder}: holds no pictures ({', '.join(SUFFIXES)}); put some there{hint}"
        )
    return Listing(folder, pictures, dict(sorted(skipped.items())), dict(sorted(left_out.items())))


def no_folder(path: Path) -> str:
    """Return what ``path`` is, which is no folder, and what to do."""
    if not path.exists():
        is_home = "~" in path.parts
        return "missing" + "; write the whole path: only a shell expands ~" * is_home
    if path.suffix.lower() in _ARCHIVES:
        return "is an archive; unpack it, and name its folder"
    if path.is_file() and not path.stat().st_size:
        return "is an empty file, not a folder"
    is_picture = path.suffix.lower() in (*SUFFIXES, *_OTHER_SUFFIXES)
    return "is one picture; name its folder" if is_picture else "is not a folder"


def _pictures(
    folder: Path,
    names: Iterable[str],
    captions: dict[str, str],
    root: Path,
    absent: Mapping[str, int],
    encoding: str,
    beside: Mapping[str, Sequence[Path]],
) -> tuple[list[PictureFile], dict[str, str]]:
    """Return those of the files ``names`` that are pictures, and those that cannot be used."""
    pictures, skipped, undecoded = list[PictureFile](), dict[str, str](), dict[str, bytes]()
    for name in names:
        if fault := _name_fault(name):
            skipped[_printable(name)] = fault
        elif Path(name).suffix.lower() in SUFFIXES:
            try:
                path, size = folder / name, absent.get(name)
                texts = [*texts_beside(path)] or beside.get(splitext(name)[0], ())
                caption = captions.get(name, "")
                pictures.append(_picture(path, name, caption, texts, root, size, encoding))
            except CaptionError as error:
                skipped[name] = str(error)
                undecoded |= {name: error.content} if error.content else {}
            except OSError as error:
                skipped[name] = error.strerror or "cannot be read"
    for name, codec in likely_codecs(undecoded).items():
        skipped[name] += f", {LIKELY} {codec}"
    return pictures, skipped


def _unused_texts(names: Iterable[str]) -> dict[str, str]:
    parts = [(name, *splitext(name)) for name in names]
    known = {*SUFFIXES, *_OTHER_SUFFIXES}
    pictures = {stem for _, stem, suffix in parts if suffix.lower() in known}
    unused = dict[str, str]()
    for name, stem, suffix in parts:
        if suffix.lower() in _TABLES and stem not in pictures and name not in METADATA:
            unused[_printable(name)] = UNREAD_TABLE
        elif suffix.lower() in EXTENSIONS and (stem not in pictures or suffix not in _EXTENSIONS):
            unused[_printable(name)] = "is the caption of no picture here"
    return unused


SIMILAR = "differs in case or Unicode form alone from"
"""In the reason of a text, or a row, that is read nevertheless."""


def similar(given: Iterable[str], wanted: Iterable[str]) -> dict[str, str]:
    """Return by the names ``wanted`` that of ``given`` from which each differs in case or Unicode form.

    Names that are like several have none.
    """
    by_form = defaultdict[str, list[str]](list)
    for name in given:
        by_form[_form(name)].append(name)
    found = {name: by_form.get(_form(name), []) for name in wanted}
    return {name: same[0] for name, same in found.items() if len(same) == 1}


def _form(name: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold())


def _similar_texts(
    folder: Path, names: Iterable[str], unused: dict[str, str]
) -> dict[str, list[Path]]:
    """Return the texts of pictures, by their names without suffix, that are ``unused`` but for a difference.

    Their reason in ``unused`` becomes a note.
    """
    parts = [splitext(name) for name in names]
    stems = {stem for stem, suffix in parts if suffix.lower() in SUFFIXES}
    stems -= {stem for stem, suffix in parts if suffix in _EXTENSIONS}
    texts = [name for name in unused if splitext(name)[1].lower() in EXTENSIONS]
    same = similar(stems, {splitext(name)[0] for name in texts})
    found = defaultdict[str, list[Path]](list)
    for name in texts:
        if stem := same.get(splitext(name)[0]):
            found[stem].append(folder / name)
            unused[name] = f"{SIMILAR} {_printable(stem)}, whose caption it is"
    return found


def _name_fault(name: str) -> str | None:
    """Return why the picture or film ``name`` is not read, if its name says so."""
    suffix = Path(name).suffix.lower()
    if has_controls(name) and suffix in (*SUFFIXES, *_OTHER_SUFFIXES):
        return "its name has characters that cannot be printed"  # it could not be written down
    return suffix_fault(suffix)


def suffix_fault(suffix: str) -> str | None:
    """Return why files with ``suffix`` are not read, if they are pictures or films."""
    if suffix in _OTHER_SUFFIXES:
        return f"{suffix} is not read; convert it to PNG, JPEG or WebP"
    return None


def _is_below_hidden(name: str) -> bool:
    return any(map(is_hidden, name.split("/")))


def in_order(name: str) -> list[tuple[bool, str]]:
    """Return a key that sorts names as they are listed: the files of a folder, then those below it."""
    *folders, last = name.split("/")
    return [*((True, folder) for folder in folders), (False, last)]


_HIDDEN = re.compile(r"\.(?!\.?$)")
_SYSTEM = re.compile(
    r"@(eadir|tmp|recycle|recently-snapshot|share(bin|snap))|#(recycle|snapshot)|~snapshot|__macosx.*"
    r"|lost\+found|\$recycle\.bin|recycler|system volume information|found\.\d{3}|(eh)?thumbs(_vista)?\.db"
    r"|desktop\.ini|icon\r|network trash folder|temporary items|syno(file|photo)_thumb.*",
    re.IGNORECASE,
)
"""Names that NAS and operating systems give to thumbnails, bins and the like."""


def is_hidden(name: str) -> bool:
    """Return whether the file or folder ``name`` is hidden, or one of a NAS or an operating system."""
    return _HIDDEN.match(name) is not None or _SYSTEM.fullmatch(name) is not None


class _Tree:
    """The files of a folder and of the folders below it, also through links; each folder is read once.

    A file or folder that is reached without a link has that name, whichever links lead to it too.
    """

    def __init__(self, folder: Path, root: Path) -> None:
        """Walk ``folder``; links are followed to what is below ``root``. DataError if it is unreadable."""
        self._folder, self._root = folder, root
        self.names, self.skipped, self.left_out = list[str](), dict[str, str](), dict[str, str]()
        self._folders, self._files = dict[str, str](), dict[str, str]()  # names of what is read
        self._links = list[str]()  # to folders
        self._linked = list[str]()
        self._read("")
        for name in self._links:  # grows meanwhile
            self._follow(name)
        for name in sorted(self._linked, key=in_order):
            if (other := self._files.setdefault(realpath(folder / name), name)) == name:
                self.names.append(name)
            else:
                self.left_out[_printable(name)] = f"is the file {_printable(other)}, which is read"

    def _read(self, top: str) -> None:
        for parent, folders, files in os.walk(self._folder / top, onerror=_refuse):
            real, below = realpath(parent), Path(parent).relative_to(self._folder)
            if (other := self._folders.setdefault(real, below.as_posix())) != below.as_posix():
                self._leave_out(f"{below.as_posix()}/", f"is the folder {other}, which is read")
                folders.clear()
                continue
            hidden = {name for name in (*folders, *files) if is_hidden(name)}
            for name in sorted(hidden):
                is_folder = "/" if name in folders else ""
                if name not in (FAULTS, LEFT_OUT):
                    self._leave_out(f"{(below / name).as_posix()}{is_folder}", hidden_reason(name))
            links = {name for name in folders if os.path.islink(os.path.join(parent, name))}
            self._links += sorted((below / name).as_posix() for name in links - hidden)
            folders[:] = sorted({*folders} - hidden - links)
            for name in sorted({*files} - hidden):
                self._add((below / name).as_posix(), os.path.join(real, name))

    def _add(self, name: str, real: str) -> None:
        path = self._folder / name
        if is_sheet_among_pictures(path):
            self._leave_out(name, "is a contact sheet of fluxtrain")
        elif not os.path.islink(path):
            self._files[real] = name
            self.names.append(name)
        elif not path.exists() and path.suffix.lower() not in (*SUFFIXES, *EXTENSIONS):
            # without a suffix it may have led to a folder of pictures
            kind = self.left_out if path.suffix else self.skipped
            kind[_printable(name)] = "is a link to nothing"
        elif path.exists() and not _leads_out(path, self._root):
            self._linked.append(name)
        else:
            self.names.append(name)  # whoever reads it says what is wrong

    def _follow(self, name: str) -> None:
        target = realpath(self._folder / name)
        if _leads_out(self._folder / name, self._root):
            self.skipped[f"{_printable(name)}/"] = _OUT.format(self._root)
        elif is_hidden(Path(target).name) and not Path(target).name.startswith("."):
            self._leave_out(f"{name}/", hidden_reason(Path(target).name))
        else:
            self._read(name)

    def _leave_out(self, name: str, reason: str) -> None:
        self.left_out[_printable(name)] = reason


def _refuse(error: OSError) -> None:
    raise DataError(f"{error.filename}: cannot be read ({error.strerror})")


def hidden_reason(name: str) -> str:
    """Return why the file or folder ``name``, which `is_hidden`, is left out."""
    return "is hidden" if name.startswith(".") else "belongs to a NAS or an operating system"


def _printable(name: str) -> str:
    return ascii(name) if has_controls(name) else name


def _picture(
    path: Path,
    name: str,
    caption: str,
    texts: Sequence[Path],
    root: Path,
    size: int | None,
    encoding: str,
) -> PictureFile:
    for each in (path, *texts):
        if _leads_out(each, root):
            raise CaptionError(f"{'' if each == path else each.name + ' '}{_OUT.format(root)}")
    modified = 0
    if size is None:
        status = path.stat()
        if not path.is_file():
            raise CaptionError("is not a regular file")
        size, modified = status.st_size, status.st_mtime_ns
    read = (read_caption(text, encoding) for text in texts)
    return PictureFile(name, size, modified, caption or next(filter(None, read), ""))


def _leads_out(path: Path, root: Path) -> bool:
    """Return whether ``path`` is a link to a file that is not below ``root``."""
    return path.is_symlink() and not Path(realpath(path)).is_relative_to(realpath(root))


def texts_beside(path: Path) -> Iterator[Path]:
    """Yield the text and JSON files beside the picture ``path``; the first with a caption is used."""
    for extension in (*_EXTENSIONS, _SIDECAR):
        beside = path.with_suffix(extension)
        if beside.is_file() or beside.is_symlink():  # a broken link is named when it is read
            yield beside


FILE = "contact-sheet.png"
"""Name of a contact sheet, if no other is given; in a folder of pictures it must have this one."""
MARK = ("Software", "fluxtrain contact sheet")
"""Text field of the PNG."""
_HEAD_BYTES = 1024


def is_contact_sheet(path: Path) -> bool:
    """Return whether the file ``path`` has the MARK; nothing is decoded. Raises OSError if unreadable."""
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


_EXTENSIONS = (*EXTENSIONS, *map(str.upper, EXTENSIONS))
_SIDECAR = ".json"
METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
_TABLES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
COLUMNS = ("text", "caption", "prompt")
"""Columns of a metadata file that hold the caption: the first of them that there is."""
_FILE = "file_name"
CAPTION_ENCODING = "spec.run.data.caption_encoding"
_MAX_CAPTION_BYTES = 1 << 16
_MAX_METADATA_BYTES = 1 << 28
"""Of a metadata file: a million captions of 250 letters."""
_MAX_ROW = 1 << 20
"""Characters of a row."""


class CaptionError(ValueError):
    """A caption cannot be used; the message says why."""

    content = b""
    """Its first bytes, if it is of another codec."""


def read_caption(path: Path, encoding: str = "utf-8") -> str:
    """Return the caption in the text or JSON file ``path`` on one line; CaptionError if it is not text."""
    most = _MAX_ROW if path.suffix == _SIDECAR else _MAX_CAPTION_BYTES
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise CaptionError(f"its caption {path.name} cannot be read ({error.strerror})") from None
    if len(content) > most:
        raise CaptionError(f"its caption {path.name} has more than {most} bytes")
    try:
        if path.suffix == _SIDECAR:
            return one_line(json_caption(content, encoding) or "")
        text = text_of(content, encoding)
        if CONTROL.search(text) and is_wide(content):
            raise UnicodeError("it is UTF-16")
    except UnicodeError:
        refused = CaptionError(f"its caption {path.name} is not {shown(encoding)}")
        refused.content = content[:HEAD_BYTES]
        raise refused from None
    except ValueError as error:
        raise CaptionError(f"its caption in {path.name} {error}") from None
    if "\0" in text:
        raise CaptionError(f"its caption {path.name} is not text")
    return one_line(text)


def json_caption(content: bytes, encoding: str) -> str | None:
    """Return the first text of COLUMNS in ``content``, JSON; None if it has none of them.

    Raises UnicodeError if it is of another codec, ValueError if it has another fault.
    """
    try:  # of bytes in UTF-8 or UTF-16
        values = json.loads(content if shown(encoding) == "UTF-8" else text_of(content, encoding))
    except json.JSONDecodeError as error:
        raise ValueError(f"cannot be read ({error})") from None
    except RecursionError:
        raise ValueError("cannot be read (nested too deeply)") from None
    if not isinstance(values, dict):
        return None
    texts = [values[column] for column in COLUMNS if values.get(column) is not None]
    text = next((each for each in texts if isinstance(each, str)), texts[0] if texts else None)
    if text is not None and not isinstance(text, str):
        raise ValueError(f"is {str(text)[:40]}, not a text")
    return text


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


def read_metadata(path: Path, encoding: str = "utf-8") -> dict[str, str]:
    """Return the captions in the metadata file ``path`` by file name in its order, "" where a row has none.

    Raises DataError, with the line, if a row is malformed, or names a file twice or outside of the folder.
    """
    captions = dict[str, str]()
    for number, row in enumerate(_rows(path, encoding), 1):
        name = row.get(_FILE)
        if not isinstance(name, str) or not name:
            columns = ", ".join(map(str, row))[:100]
            raise DataError(f"{path}: row {number} has no {_FILE}; it has {columns}")
        if has_controls(name):
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


def _rows(path: Path, encoding: str) -> Iterator[dict[str, Any]]:
    try:
        if path.stat().st_size > _MAX_METADATA_BYTES:
            raise DataError(f"{path}: has more than {_MAX_METADATA_BYTES} bytes")
        if path.suffix == ".parquet":
            from fluxtrain.data.pictures.tables import read_rows

            yield from read_rows(path, (_FILE, *COLUMNS))
            return
        newline = "" if (is_csv := path.suffix == ".csv") else "\n"
        with open_regular(path) as file:
            codec = codec_of(os.pread(file, _HEAD_BYTES, 0), encoding)
            with open(file, encoding=codec, newline=newline, closefd=False) as opened:
                lines = _Lines(path, opened)
                yield from _csv_rows(path, lines) if is_csv else _json_rows(path, lines)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeError:
        likely = likely_codec(path)
        text = f"is not {shown(encoding)}{f', {LIKELY} {likely}' if likely else ''}"
        raise DataError(f"{path}: {text}; convert it, or set {CAPTION_ENCODING}") from None


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
