"""Whether a path is a folder of pictures, or a source that must be fetched or unpacked."""

from __future__ import annotations

import os
from pathlib import Path

from fluxtrain.contract.run.download import is_url
from fluxtrain.data.pictures.captions import METADATA
from fluxtrain.data.pictures.folder import SUFFIXES
from fluxtrain.data.pictures.shards import SHARD
from fluxtrain.data.pictures.sheet_mark import is_sheet_among_pictures
from fluxtrain.data.pictures.tables import TABLE


def source_of(given: str, path: Path) -> str:
    """Return ``given`` if it is a URL, ``path`` if it is of shards or tables, "" if it is of pictures.

    Shards may be one file, a range in braces, or a folder without pictures.
    """
    if is_url(given):
        return given
    is_packed = _is_packed(path.name) and not path.is_dir()
    return str(path) if is_packed or _holds_packed_only(path) else ""


def _is_packed(name: str) -> bool:
    return name.lower().endswith((SHARD, TABLE)) and name not in METADATA


def _holds_packed_only(folder: Path) -> bool:
    has_packed = False
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        pictures = (name for name in files if Path(name).suffix.lower() in SUFFIXES)
        if not all(is_sheet_among_pictures(Path(parent) / name) for name in pictures):
            return False
        has_packed |= any(map(_is_packed, files))
    return has_packed
