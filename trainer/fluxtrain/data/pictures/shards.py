"""Pictures in WebDataset tars, which are written out as a folder of pictures before they are encoded.

A tar is validated first, from its headers: links, huge or unnamed members and names that lead out of it are
left out, and one that is cut off is refused. Then the webdataset library reads it, once, from start to end.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fluxtrain.data.pictures.captions import COLUMNS
from fluxtrain.data.pictures.faults import Faults
from fluxtrain.data.pictures.folder import SUFFIXES
from fluxtrain.data.tar.index import MAX_CAPTION_BYTES, MAX_METADATA_BYTES, split_name
from fluxtrain.data.tar.members import Member, quoted, read_members

SHARD = ".tar"
_PICTURES = {suffix[1:] for suffix in SUFFIXES}
_LIMITS = {"txt": MAX_CAPTION_BYTES, "caption": MAX_CAPTION_BYTES, "json": MAX_METADATA_BYTES}
_MAX_PART = 200
"""Most bytes of one part of a name, of 255 that file systems allow."""


def unpack(tar: Path, folder: Path, check: Callable[[], object] = lambda: None) -> None:
    """Write pictures and captions of ``tar`` to ``folder``, whole or not at all; it may exist already.

    ``check`` is called for each sample; what it raises ends the work.
    Raises DataError if the tar is not whole.
    """
    if folder.exists():
        return
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    accepted, faults = _accepted(tar)
    count = 0
    for sample in _samples(tar, accepted):
        check()
        count += _write(sample, partial, faults)
    if not count:
        faults.add("", f"holds no pictures{faults.example()}")
    faults.write(partial)
    partial.rename(folder)


def _accepted(tar: Path) -> tuple[set[str], Faults]:
    """Return the names of the members that are read, and of pictures that are not, with the reason."""
    names, faults = set[str](), Faults()
    for member in read_members(tar):
        key, suffix = split_name(member.name)
        fault = member.fault or _fault(member, key, suffix)
        if fault is None and member.name in names:
            fault = "there are several of this name"
        if fault:
            faults.add(quoted(member.name), fault)
        elif suffix in _PICTURES or suffix in _LIMITS:
            names.add(member.name)
    return names, faults


def _fault(member: Member, key: str, suffix: str) -> str | None:
    limit = _LIMITS.get(suffix)
    if limit is not None and member.size > limit:
        return f"it has {member.size} bytes, at most {limit} are read"
    if suffix in _PICTURES and not key:
        return "it has no name before its suffix"
    if key and suffix not in _PICTURES and suffix.rpartition(".")[2] in _PICTURES:
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


def _write(sample: dict[str, Any], folder: Path, faults: Faults) -> int:
    """Write the picture of ``sample`` and its caption; return the number of pictures.

    Members of a sample that do not follow each other come as several samples of the same name.
    """
    key = str(sample["__key__"]).removeprefix("./")
    first, *others = [suffix for suffix in sample if suffix in _PICTURES] or [""]
    for suffix in others:
        faults.add(quoted(f"{key}.{suffix}"), f"the sample has a picture .{first} already")
    caption = _caption(sample)
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


def _caption(sample: dict[str, Any]) -> bytes | None:
    """Return the caption of ``sample``, of a text member or of its JSON, as a file."""
    for suffix in ("txt", "caption"):
        if suffix in sample:
            return bytes(sample[suffix])
    try:
        content = json.loads(sample.get("json", b"{}"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    texts = (content.get(column) for column in COLUMNS)
    text = next((text for text in texts if isinstance(text, str)), None)
    return None if text is None else text.encode("utf-8", "replace")
