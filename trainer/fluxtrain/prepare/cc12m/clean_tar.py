"""One raw CC12M tar made into a cleaned one of the same name, with a record of what was left out.

NAME.tar              the samples that are fit, in their order; appears whole
work/NAME.tar.json    the record, written after it: without it the tar counts as not made
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fluxtrain.data.tar.index import SIDECAR, open_index
from fluxtrain.data.tar.writer import TarWriter
from fluxtrain.errors import DataError
from fluxtrain.prepare.cc12m.image import RejectedError, clean
from fluxtrain.prepare.cc12m.raw_tar import RawSample, RawTar
from fluxtrain.prepare.cc12m.source import Source
from fluxtrain.prepare.staging_dir import StagingDir, read_json, storage_errors, write_json

NOT_UTF8, UNWRITABLE = "caption not UTF-8", "key or caption that a tar cannot hold"


@dataclass(frozen=True)
class Dropped:
    """A sample that was left out; ``position`` counts from the start of its raw tar."""

    position: int
    key: str
    reason: str
    detail: str = ""


@dataclass
class Record:
    """What became of the samples of one raw tar; ``kept`` are positions, as in the cleaned tar."""

    tar: str
    stamp: Any
    num_samples: int = 0
    kept: list[int] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)


@dataclass(frozen=True)
class Summary:
    """What the one who asked must know of a cleaned tar."""

    tar: str
    num_samples: int
    num_kept: int


def clean_tar(name: str, source: Source, draft: StagingDir) -> Summary:
    """Clean the raw tar ``name`` into ``draft``, unless that is done.

    Raises DataError where the tar is not whole, StorageError where the draft cannot be written.
    """
    stamp = source.stamp(name)
    record = read_record(draft, name)
    if record is None or record.stamp != stamp:
        with storage_errors(draft.folder), source.open(name, draft.work) as raw:
            record = _clean(name, stamp, raw, draft)
    return Summary(name, record.num_samples, len(record.kept))


def read_record(draft: StagingDir, name: str) -> Record | None:
    """Return the record of the tar ``name``, or None where it has not been cleaned."""
    content = read_json(_record_path(draft, name))
    if content is None:
        return None
    content["dropped"] = [Dropped(*row) for row in content["dropped"]]
    record = Record(**content)
    return record if not record.kept or (draft.folder / name).exists() else None


def keep_only(name: str, draft: StagingDir, record: Record, fits: Callable[[int], bool]) -> None:
    """Drop the samples from the cleaned tar ``name`` whose positions do not fit; no record is left."""
    keep = [fits(position) for position in record.kept]
    if all(keep):
        return
    forget(name, draft)
    tar = draft.folder / name
    with RawTar(tar) as cleaned, _writing(name, draft) as writer:
        for sample, kept in zip(cleaned.samples(), keep, strict=True):
            if kept and sample.image and sample.caption:
                caption = cleaned.read(sample.caption).decode()
                writer.add(sample.key, cleaned.read(sample.image), "png", caption)


def forget(name: str, draft: StagingDir) -> None:
    """Remove the record of ``name``: its tar is to be made anew if this is interrupted."""
    _record_path(draft, name).unlink(missing_ok=True)


def remove(name: str, draft: StagingDir) -> None:
    """Remove the cleaned tar ``name`` and what belongs to it."""
    forget(name, draft)
    (draft.folder / name).unlink(missing_ok=True)
    (draft.folder / f"{name}{SIDECAR}").unlink(missing_ok=True)


def _clean(name: str, stamp: Any, raw: Path, draft: StagingDir) -> Record:
    record = Record(name, stamp)
    with RawTar(raw) as tar, _writing(name, draft) as writer:
        for sample in tar.samples():
            record.num_samples += 1
            try:
                _add(writer, tar, sample)
                record.kept.append(sample.position)
            except RejectedError as why:
                dropped = Dropped(sample.position, sample.key, why.reason, why.detail)
                record.dropped.append(dropped)
    content = asdict(record) | {"dropped": [list(asdict(d).values()) for d in record.dropped]}
    write_json(_record_path(draft, name), content)
    return record


def _add(writer: TarWriter, tar: RawTar, sample: RawSample) -> None:
    """Append the cleaned ``sample``; RejectedError where it has a fault."""
    if sample.image is None or sample.caption is None:
        raise RejectedError(sample.fault or "", sample.detail)
    try:
        caption = tar.read(sample.caption).decode("utf-8")
    except UnicodeDecodeError:
        raise RejectedError(NOT_UTF8) from None
    picture = clean(tar.read(sample.image))
    try:
        writer.add(sample.key, picture, "png", caption)
    except DataError as error:
        raise RejectedError(UNWRITABLE, str(error)) from None


@contextmanager
def _writing(name: str, draft: StagingDir) -> Iterator[TarWriter]:
    """Yield a writer of the cleaned tar ``name``; with no sample in it, there is none afterwards."""
    making, tar = draft.work / f"{name}.{os.getpid()}", draft.folder / name
    shutil.rmtree(making, ignore_errors=True)
    with TarWriter(making, shard_size=sys.maxsize) as writer:
        yield writer
    made = list(making.glob("*.tar"))
    if made:
        _to_disk(made[0])
        made[0].replace(tar)
        open_index(tar)
    else:
        remove(name, draft)
    making.rmdir()


def _to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _record_path(draft: StagingDir, name: str) -> Path:
    return draft.work / f"{name}.json"
