"""CC12M for MLPerf: raw ``cc12m-wds`` tars in, cleaned tars out, as the reference cleans them.

Unreadable samples and those with a side below 256 pixels are dropped; the first 1,099,776 of the others,
in the order of the raw set, are the data set. Tars are cleaned in parallel and independently, and
survive SIGKILL; the first samples are selected at the end, so the result does not depend on the number
of workers.

    OUTPUT/cc12m-train-0000.tar …   as data/tar reads them, with their indices
    OUTPUT/dropped.jsonl            every dropped sample and the reason
    OUTPUT/problematic_indices.txt  the indices of unreadable samples, found anew, as the reference lists them
    OUTPUT/report.json              counts, by reason and by tar

work/NAME.tar.json is the record of a tar, written last: without it the tar is cleaned again.

The reference reads with Hugging Face's ``datasets`` (EXIF orientation applied; consecutive members with
the same key are one sample, incomplete ones count too), resizes and crops with torchvision, and converts
to RGB in training; here all of it is done once, with bit-identical pixels: see docs/data.md.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any, TextIO

from PIL import ExifTags, Image, ImageOps

from fluxtrain.data.formats.tar import Member, quoted, read_members
from fluxtrain.data.formats.tar_index import IMAGE_SUFFIXES, SIDECAR, open_index, split_name
from fluxtrain.data.formats.tar_writer import TarWriter
from fluxtrain.errors import ConfigError, DataError
from fluxtrain.prepare.download import Source
from fluxtrain.prepare.work import (
    SETTINGS,
    SIZE,
    StagingDir,
    encode,
    error_summary,
    finished_report,
    map_in_order,
    open_staging_dir,
    read_json,
    write_json,
)
from fluxtrain.runtime.files import atomic_write, read_bytes, storage_errors, sync
from fluxtrain.runtime.progress_bar import Advance, OnProgress, ProgressBar

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


def _keep_only(selection: TarSelection, staging: StagingDir) -> None:
    """Rewrite the cleaned tar of ``selection`` with its samples only.

    The record is removed first: without it the tar is cleaned again if this is interrupted.
    """
    name, kept = selection.tar, _require_cleaned(staging, selection.tar).kept
    keep = [position < selection.end and position not in selection.listed for position in kept]
    if all(keep):
        return
    _record_path(staging, name).unlink(missing_ok=True)
    with open_raw_tar(staging.path / name) as cleaned, _writing(name, staging) as writer:
        for sample, is_kept in zip(cleaned.samples(), keep, strict=True):
            if is_kept and sample.image and sample.caption:
                caption = cleaned.read(sample.caption).decode()
                writer.add(sample.key, cleaned.read(sample.image), "png", caption)


def remove(name: str, staging: StagingDir) -> None:
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
        sync(written[0])
        written[0].replace(tar)
        open_index(tar)
    else:
        remove(name, staging)
    scratch.rmdir()


def _record_path(staging: StagingDir, name: str) -> Path:
    return staging.work / f"{name}.json"


_MAX_PIXELS = 178_956_970
"""Pillow's limit against decompression bombs, which the reference uses too."""
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""Some of Pillow's other formats start external programs; the raw set is all JPEG."""
UNREADABLE = "unreadable image"
SMALL = f"a side below {SIZE} pixels"


class RejectedError(ValueError):
    """The sample is dropped; ``reason`` is one of a few, ``detail`` is specific to the sample."""

    def __init__(self, reason: str, detail: str = "") -> None:
        """Take the reason, which is counted, and the detail, which is only logged."""
        super().__init__(reason)
        self.reason, self.detail = reason, detail


def clean(content: bytes) -> bytes:
    """Return the image file ``content`` as a PNG of 256 x 256 pixels, RGB.

    Raises RejectedError if it is unreadable or has a side below 256 pixels.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # large images and odd EXIF, which the reference keeps
            return _clean_image(content)
    except (RejectedError, MemoryError):
        raise
    except Exception as error:  # on malformed bytes a decoder may raise anything
        raise RejectedError(UNREADABLE, error_summary(error)) from None


def _clean_image(content: bytes) -> bytes:
    with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
        width, height = image.size  # from the header: nothing is decoded yet
        if min(width, height) < SIZE:
            raise RejectedError(SMALL, f"{width} x {height}")
        if width * height > _MAX_PIXELS:
            text = f"{width} x {height} pixels, at most {_MAX_PIXELS} are decoded"
            raise RejectedError(UNREADABLE, text)
        image.load()
        turned: Image.Image = image
        if image.getexif().get(ExifTags.Base.Orientation) is not None:
            # raises if the EXIF is damaged, as the reference
            turned = ImageOps.exif_transpose(image)
        whole = _resize(turned)
        # half pixels are rounded to even, as in torchvision
        left, top = round((whole.width - SIZE) / 2), round((whole.height - SIZE) / 2)
        return encode(whole.crop((left, top, left + SIZE, top + SIZE)))


def _resize(image: Image.Image) -> Image.Image:
    """Return ``image`` with its short side at 256; the long side is rounded down, as in torchvision."""
    short, long = sorted(image.size)
    if short == SIZE:
        return image
    other = SIZE * long // short
    size = (SIZE, other) if image.width <= image.height else (other, SIZE)
    return image.resize(size, Image.Resampling.BICUBIC)


NO_IMAGE, NO_CAPTION, TWICE = "no image", "no caption", "two images or two captions"
UNUSABLE = "unusable member"
_MOST_MEMBERS = 16
"""Members read of one sample; more are ignored."""


@dataclass(frozen=True)
class RawSample:
    """The members of one sample, or the ``fault``, with ``detail``, for which it cannot be used."""

    position: int
    key: str
    image: Member | None = None
    caption: Member | None = None
    fault: str | None = None
    detail: str = ""


@contextmanager
def open_raw_tar(path: Path) -> Iterator[RawTar]:
    """Yield the tar ``path``; DataError if it is missing."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    try:
        yield RawTar(path, file)
    finally:
        os.close(file)


class RawTar:
    """An open tar of samples; DataError, naming the tar, if it is not complete."""

    def __init__(self, path: Path, file: int) -> None:
        self._path, self._file = path, file

    def samples(self) -> Iterator[RawSample]:
        """Yield the samples; DataError if the tar is incomplete."""
        grouped = groupby(self._members(), key=lambda member: split_name(member.name)[0])
        for position, (key, group) in enumerate(grouped):
            yield _sample(position, key, list(islice(group, _MOST_MEMBERS)))

    def read(self, member: Member) -> bytes:
        try:
            content = read_bytes(self._file, member.offset, member.size)
        except OSError as error:
            raise DataError(f"{self._path}: {error.strerror}") from None
        if len(content) < member.size:
            raise DataError(f"{self._path}: truncated while it was read")
        return content

    def _members(self) -> Iterator[Member]:
        """Yield the members that are parts of samples; DataError if one extends beyond the tar's end."""
        end = os.fstat(self._file).st_size
        for member in read_members(self._path):
            if member.offset + member.size > end:
                name = quoted(member.name)
                raise DataError(f"{self._path}: member {name} is cut off: not a whole tar")
            # `datasets` counts the same members as parts of samples: positions must agree with it
            if all(split_name(member.name)) and not member.name.rpartition("/")[2].startswith("__"):
                yield member


def _sample(position: int, key: str, members: list[Member]) -> RawSample:
    images = [member for member in members if split_name(member.name)[1] in IMAGE_SUFFIXES]
    captions = [member for member in members if split_name(member.name)[1] == "txt"]
    if len(images) > 1 or len(captions) > 1:
        return RawSample(position, key, fault=TWICE)
    if not images:
        return RawSample(position, key, fault=NO_IMAGE)
    if not captions:
        return RawSample(position, key, fault=NO_CAPTION)
    if detail := images[0].fault or captions[0].fault:
        return RawSample(position, key, fault=UNUSABLE, detail=detail)
    return RawSample(position, key, images[0], captions[0])


NUM_SAMPLES = 1_099_776
LISTED = "listed as problematic"
_PROBLEMATIC = (UNREADABLE, NOT_UTF8)
"""Reasons for which reading a sample fails in the reference."""
FOUND = "problematic_indices.txt"
_MAX_LIST_BYTES = 1 << 26


@dataclass(frozen=True)
class TarSelection:
    """The samples of one tar that are in the data set: kept ones before ``end`` that are not ``listed``.

    ``first`` is the index in the raw set of its first sample; ``end`` and ``listed`` are positions in the
    tar.
    """

    tar: str
    first: int
    end: int
    listed: frozenset[int]
    num_kept: int


def prepare_cc12m(
    source: Source,
    output: Path,
    num_samples: int | None = NUM_SAMPLES,
    problematic: frozenset[int] = frozenset(),
    num_workers: int | None = None,
    force: bool = False,
    stream: TextIO = sys.stderr,
    on_progress: OnProgress = lambda done, total: None,
) -> dict[str, Any]:
    """Make ``output`` from the tars in ``source``, resuming an unfinished one; return the report.

    ``num_samples`` None takes all; samples at the indices ``problematic`` are always dropped.
    ``on_progress`` gets samples, or tars if all samples are taken. Raises DataError if a tar is incomplete
    or there are too few usable samples, StorageError if the output cannot be written.
    """
    settings = {**SETTINGS, "samples": num_samples, "problematic": _digest(problematic)}
    report = None if force else finished_report(output, settings)
    if report is None:
        names = source.names()
        with open_staging_dir(output, SETTINGS, force) as staging:
            clean = partial(clean_tar, source=source, staging=staging)
            total = num_samples or len(names)
            with (
                ProgressBar("clean", total, stream, on_progress=on_progress) as bar,
                closing(map_in_order(clean, names, num_workers)) as tars,
            ):
                selections = list(_select(tars, num_samples, problematic, bar.advance))
            _require_enough(staging, selections, num_samples)
            report = {"settings": settings, **_assemble(staging, selections, problematic)}
            staging.finish(report)
    print(f"{output}: {summarize(report)}", file=stream, flush=True)
    return report


def read_problematic(path: Path) -> frozenset[int]:
    """Return the indices in ``path``, one per line as in the reference's list; ConfigError if malformed."""
    try:
        with path.open("rb") as file:
            lines = file.read(_MAX_LIST_BYTES).decode("ascii").split()
        if wrong := next((it for it in lines if not it.isdigit() or len(it) > 18), None):
            raise ValueError(wrong[:50])
        return frozenset(map(int, lines))
    except OSError as error:
        raise ConfigError("--problematic", str(path), str(error.strerror)) from None
    except ValueError as error:
        raise ConfigError("--problematic", str(path), f"not one index a line: {error}") from None


def summarize(report: dict[str, Any]) -> str:
    """Return the report in one sentence."""
    reasons = [f"{count:,} {reason}" for reason, count in report["dropped"].items()]
    compared = ""
    if "listed_but_readable" in report:
        unlisted, readable = report["unreadable_but_not_listed"], report["listed_but_readable"]
        compared = (
            f"; against the list: {unlisted:,} more are unreadable here, {readable:,} are readable"
        )
    dropped = ", ".join(reasons) or "none"
    return f"{report['kept']:,} of {report['read']:,} samples kept; dropped: {dropped}{compared}"


def _select(
    tars: Iterator[CleanedTar],
    num_samples: int | None,
    problematic: frozenset[int],
    advance: Advance,
) -> Iterator[TarSelection]:
    """Yield a selection for each tar until there are ``num_samples``; no further tar is cleaned."""
    first = num_kept = 0
    for tar in tars:
        listed = frozenset(
            at - first for at in problematic if first <= at < first + tar.num_samples
        )
        kept = [position for position in tar.kept if position not in listed]
        selection = TarSelection(tar.tar, first, tar.num_samples, listed, len(kept))
        if num_samples is not None and len(kept) >= (missing := num_samples - num_kept):
            selection = TarSelection(tar.tar, first, kept[missing - 1] + 1, listed, missing)
        first, num_kept = first + tar.num_samples, num_kept + selection.num_kept
        advance(1 if num_samples is None else selection.num_kept)
        yield selection
        if num_kept == num_samples:
            return


def _require_enough(
    staging: StagingDir, selections: list[TarSelection], num_samples: int | None
) -> None:
    num_kept = sum(selection.num_kept for selection in selections)
    if num_samples is not None and num_kept < num_samples:
        num_read = selections[-1].first + selections[-1].end
        raise DataError(
            f"only {num_kept:,} of {num_read:,} samples are usable, {num_samples:,} are needed: tars are "
            "missing, or use --samples all; the cleaned tars are kept"
        )
    if not num_kept:
        rows = [_require_cleaned(staging, selection.tar).dropped for selection in selections]
        reasons = Counter(row.reason for of_tar in rows for row in of_tar)
        told = ", ".join(f"{count:,} {reason}" for reason, count in sorted(reasons.items()))
        raise DataError(f"none of the samples is usable: {told or 'the tars are empty'}")


def _assemble(
    staging: StagingDir, selections: list[TarSelection], problematic: frozenset[int]
) -> dict[str, Any]:
    """Reduce the tars in ``staging`` to ``selections``, write dropped.jsonl, and return the report."""
    selected = {selection.tar for selection in selections}
    for path in sorted(staging.path.glob("*.tar")):
        if path.name not in selected:
            remove(path.name, staging)
    dropped, reasons, found = staging.path / "dropped.jsonl", Counter[str](), set[int]()
    with atomic_write(dropped) as partial, partial.open("w", encoding="utf-8") as file:
        for selection in selections:
            cleaned = _require_cleaned(staging, selection.tar)
            rows = list(_dropped_rows(selection, cleaned))
            file.writelines(f"{json.dumps(row)}\n" for row in rows)
            reasons.update(row["reason"] for row in rows)
            found |= {
                selection.first + row.position
                for row in cleaned.dropped
                if row.reason in _PROBLEMATIC and row.position < selection.end
            }
    with atomic_write(staging.path / FOUND) as partial:
        partial.write_text("".join(f"{index}\n" for index in sorted(found)), encoding="utf-8")
    for selection in selections:
        _keep_only(selection, staging)
    report: dict[str, Any] = {
        "kept": sum(selection.num_kept for selection in selections),
        "read": sum(selection.end for selection in selections),
        "dropped": dict(sorted(reasons.items())),
        "tars": [{"tar": s.tar, "read": s.end, "kept": s.num_kept} for s in selections],
    }
    if problematic:  # compared where both looked
        seen = {index for index in problematic if index < report["read"]}
        only_found, only_listed = sorted(found - seen), sorted(seen - found)
        report["unreadable_but_not_listed"] = len(only_found)
        report["listed_but_readable"] = len(only_listed)
        report["problematic_indices"] = {"only_found": only_found, "only_listed": only_listed}
    return report


def _dropped_rows(selection: TarSelection, cleaned: CleanedTar) -> Iterator[dict[str, Any]]:
    rows = [(row.position, row.key, row.reason, row.detail) for row in cleaned.dropped]
    rows += [(at, "", LISTED, "it could be read") for at in selection.listed & set(cleaned.kept)]
    for position, key, reason, detail in sorted(rows):
        if position < selection.end:
            reason = LISTED if position in selection.listed else reason
            row = {"index": selection.first + position, "tar": selection.tar, "key": key}
            yield {**row, "reason": reason, "detail": detail}


def _require_cleaned(staging: StagingDir, name: str) -> CleanedTar:
    cleaned = read_cleaned_tar(staging, name)
    if cleaned is None:
        raise DataError(f"{staging.work}: the record of {name} has disappeared")
    return cleaned


def _digest(problematic: frozenset[int]) -> str | None:
    text = "\n".join(map(str, sorted(problematic)))
    return hashlib.sha256(text.encode()).hexdigest() if problematic else None
