"""Cleans one raw CC12M tar into a tar of the same name, and records which samples were dropped.

NAME.tar              the usable samples, in their order; renamed into place when complete
work/NAME.tar.json    the record, written last: without it the tar is cleaned again
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
from fluxtrain.prepare.cc12m.raw_tar import RawSample, RawTar, open_raw_tar
from fluxtrain.prepare.cc12m.source import Source
from fluxtrain.prepare.staging_dir import StagingDir, read_json, storage_errors, write_json

NOT_UTF8, UNWRITABLE = "caption not UTF-8", "key or caption that a tar cannot hold"


@dataclass(frozen=True)
class Dropped:
    """A dropped sample; ``position`` counts from the start of its raw tar."""

    position: int
    key: str
    reason: str
    detail: str = ""


@dataclass
class CleanedTar:
    """The record of one raw tar; ``kept`` are the positions of the samples in the cleaned tar."""

    tar: str
    stamp: Any
    num_samples: int = 0
    kept: list[int] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)


def clean_tar(name: str, source: Source, staging: StagingDir) -> CleanedTar:
    """Clean the raw tar ``name`` into ``staging``, unless that was done before; return its record.

    Raises DataError if the tar is incomplete, StorageError if ``staging`` cannot be written.
    """
    stamp = source.stamp(name)
    record = read_cleaned_tar(staging, name)
    if record is None or record.stamp != stamp:
        with storage_errors(staging.path), source.open(name, staging.work) as raw:
            record = _clean(name, stamp, raw, staging)
    return record


def read_cleaned_tar(staging: StagingDir, name: str) -> CleanedTar | None:
    """Return the record of the tar ``name``, or None if it has not been cleaned."""
    content = read_json(_record_path(staging, name))
    if content is None:
        return None
    content["dropped"] = [Dropped(*row) for row in content["dropped"]]
    record = CleanedTar(**content)
    return record if not record.kept or (staging.path / name).exists() else None


def keep_only(
    name: str, staging: StagingDir, record: CleanedTar, includes: Callable[[int], bool]
) -> None:
    """Rewrite the cleaned tar ``name`` with only the samples whose positions are included.

    The record is removed first: without it the tar is cleaned again if this is interrupted.
    """
    keep = [includes(position) for position in record.kept]
    if all(keep):
        return
    _record_path(staging, name).unlink(missing_ok=True)
    tar = staging.path / name
    with open_raw_tar(tar) as cleaned, _writing(name, staging) as writer:
        for sample, kept in zip(cleaned.samples(), keep, strict=True):
            if kept and sample.image and sample.caption:
                caption = cleaned.read(sample.caption).decode()
                writer.add(sample.key, cleaned.read(sample.image), "png", caption)


def remove(name: str, staging: StagingDir) -> None:
    """Remove the cleaned tar ``name``, its record and its index."""
    _record_path(staging, name).unlink(missing_ok=True)
    (staging.path / name).unlink(missing_ok=True)
    (staging.path / f"{name}{SIDECAR}").unlink(missing_ok=True)


def _clean(name: str, stamp: Any, raw: Path, staging: StagingDir) -> CleanedTar:
    record = CleanedTar(name, stamp)
    with open_raw_tar(raw) as tar, _writing(name, staging) as writer:
        for sample in tar.samples():
            record.num_samples += 1
            try:
                _add(writer, tar, sample)
                record.kept.append(sample.position)
            except RejectedError as error:
                dropped = Dropped(sample.position, sample.key, error.reason, error.detail)
                record.dropped.append(dropped)
    content = asdict(record) | {"dropped": [list(asdict(d).values()) for d in record.dropped]}
    write_json(_record_path(staging, name), content)
    return record


def _add(writer: TarWriter, tar: RawTar, sample: RawSample) -> None:
    """Append the cleaned ``sample``; RejectedError if it cannot be used."""
    if sample.image is None or sample.caption is None:
        raise RejectedError(sample.fault or "", sample.detail)
    try:
        caption = tar.read(sample.caption).decode("utf-8")
    except UnicodeDecodeError:
        raise RejectedError(NOT_UTF8) from None
    image = clean(tar.read(sample.image))
    try:
        writer.add(sample.key, image, "png", caption)
    except DataError as error:
        raise RejectedError(UNWRITABLE, str(error)) from None


@contextmanager
def _writing(name: str, staging: StagingDir) -> Iterator[TarWriter]:
    """Yield a writer of the cleaned tar ``name``; an empty tar is removed."""
    scratch, tar = staging.work / f"{name}.{os.getpid()}", staging.path / name
    shutil.rmtree(scratch, ignore_errors=True)
    with TarWriter(scratch, shard_size=sys.maxsize) as writer:
        yield writer
    written = list(scratch.glob("*.tar"))
    if written:
        with written[0].open("rb") as file:
            os.fsync(file.fileno())
        written[0].replace(tar)
        open_index(tar)
    else:
        remove(name, staging)
    scratch.rmdir()


def _record_path(staging: StagingDir, name: str) -> Path:
    return staging.work / f"{name}.json"
