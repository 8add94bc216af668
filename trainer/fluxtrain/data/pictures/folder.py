"""Finds the pictures of a folder and their captions; nothing is decoded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from os.path import realpath
from pathlib import Path

from fluxtrain.data.pictures.captions import (
    EXTENSIONS,
    CaptionError,
    find_metadata,
    read_caption,
    read_metadata,
)
from fluxtrain.data.pictures.sheet_mark import is_sheet_among_pictures
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
