"""COCO-2014 for MLPerf: the validation subset in tars, images resized to 256 x 256, with its timesteps.

    FOLDER/val2014.zip annotations_trainval2014.zip    verified by SHA-1, downloaded if need be
    FOLDER/annotations/ val2014/                       unpacked as far as needed; zipfile verifies each CRC-32
    OUTPUT/shard_00000.tar …    key image_id; .png, .txt and .json, which holds the timestep
    OUTPUT/val2014_30k.tsv      image_id, id, caption, timestep
    OUTPUT/report.json

The subset is the reference's: newlines are removed and ends stripped; the annotations are shuffled like
pandas' ``sample(frac=1, random_state=2023)``; the first caption of each image is kept; the first 29,696
of these, sorted by annotation id, get the timesteps 0 … 7 in turn. NumPy's frozen legacy generator gives
the same shuffle. An unreadable image is an error: the reference would skip it and evaluate on fewer
samples.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, astuple, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from PIL import Image

from fluxtrain.data.formats.tar_index import open_index
from fluxtrain.data.formats.tar_writer import TarWriter
from fluxtrain.errors import ConfigError, DataError, JoinedDataError
from fluxtrain.fetch.http import HttpClient
from fluxtrain.prepare.download import Entry, extract, fetch
from fluxtrain.prepare.work import (
    SETTINGS,
    SIZE,
    StagingDir,
    encode,
    error_summary,
    finished_report,
    map_in_order,
    open_staging_dir,
)
from fluxtrain.runtime.draws import NUM_TIMESTEPS
from fluxtrain.runtime.files import atomic_write, storage_errors
from fluxtrain.runtime.progress_bar import Advance, OnProgress, ProgressBar

IMAGES, ANNOTATIONS = "val2014.zip", "annotations_trainval2014.zip"
SHA1: Mapping[str, str] = {
    IMAGES: "fbedd73593f242db65cce6bcefde193fcedcc5c0",
    ANNOTATIONS: "8e0b9df54c175f1688400e98d1a97f292e726870",
}
"""Of each archive."""
_CAPTIONS = "annotations/captions_val2014.json"


def unpack(
    source: str, folder: Path, num_samples: int, client: HttpClient | None = None
) -> tuple[Path, Path]:
    """Return folder of the images and file of the captions of the subset, unpacked in ``folder``.

    ``source`` is the URL or folder of the archives; what is in ``folder`` and right is not copied again.
    Raises DownloadError if an archive is missing or has another SHA-1, DataError if a member is missing or
    damaged.
    """
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, sha1 in SHA1.items():
            entry = Entry(name, f"{source.rstrip('/')}/{name}", sha1, "sha1")
            fetch(entry, folder, client or HttpClient())
            print(f"{folder / name}: its SHA-1 is right", file=sys.stderr, flush=True)
        extract(folder / ANNOTATIONS, [_CAPTIONS], folder)
        rows = subset(read_annotations(folder / _CAPTIONS), num_samples)
        extract(folder / IMAGES, [str(image_path(Path("val2014"), row)) for row in rows], folder)
    return folder / "val2014", folder / _CAPTIONS


NUM_SAMPLES = 29_696
SEED = 2023
_MAX_BYTES = 1 << 30
_FLAG = "--captions"


@dataclass(frozen=True)
class Annotation:
    """One caption of one image."""

    image_id: int
    id: int
    caption: str


@dataclass(frozen=True)
class Row(Annotation):
    """A validation sample; its velocity is evaluated at t = ``timestep`` / 8."""

    timestep: int


def read_annotations(path: Path) -> list[Annotation]:
    """Return the annotations in the file ``captions_val2014.json``, in its order.

    Raises ConfigError if it is missing, DataError if it is malformed.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise DataError(f"{path}: more than {_MAX_BYTES} bytes")
        content = json.loads(text)
        return [_parse_annotation(entry) for entry in content["annotations"]]
    except OSError as error:
        raise ConfigError(_FLAG, str(path), str(error.strerror)) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: not COCO's captions: {error}") from None


def subset(annotations: list[Annotation], num_samples: int = NUM_SAMPLES) -> list[Row]:
    """Return the samples, sorted by annotation id; DataError if there are fewer images than samples.

    Raises ConfigError if the timesteps would not be equally frequent.
    """
    if num_samples % NUM_TIMESTEPS:
        raise ConfigError("--samples", num_samples, f"allowed: a multiple of {NUM_TIMESTEPS}")
    if len({annotation.id for annotation in annotations}) < len(annotations):
        raise DataError("two annotations have the same id")
    first = dict[int, Annotation]()
    for index in np.random.RandomState(SEED).permutation(len(annotations)).tolist():
        first.setdefault(annotations[index].image_id, annotations[index])
    if len(first) < num_samples:
        raise DataError(f"captions of {len(first):,} images, {num_samples:,} are needed")
    selected = sorted(list(first.values())[:num_samples], key=lambda annotation: annotation.id)
    return [
        Row(**asdict(annotation), timestep=index % NUM_TIMESTEPS)
        for index, annotation in enumerate(selected)
    ]


def tsv(rows: list[Row]) -> str:
    """Return the table of ``rows`` as tab-separated text, byte for byte as the reference writes it."""
    text = io.StringIO()
    writer = csv.writer(text, delimiter="\t", lineterminator="\n")
    writer.writerow(field.name for field in fields(Row))
    writer.writerows(astuple(row) for row in rows)
    return text.getvalue()


def _parse_annotation(entry: dict[str, Any]) -> Annotation:
    image_id, id_, caption = entry["image_id"], entry["id"], entry["caption"]
    if type(image_id) is not int or type(id_) is not int or not isinstance(caption, str):
        raise ValueError("an image_id, an id or a caption is of the wrong type")
    if not 0 <= image_id < 10**12:
        raise ValueError(f"the image_id {image_id} has more than 12 digits")
    return Annotation(image_id, id_, caption.replace("\n", "").strip())


SHARD_SIZE = 1000
TSV = "val2014_30k.tsv"
_MAX_PIXELS = 1 << 26
_MAX_FAULTS_SHOWN = 10


@dataclass(frozen=True)
class Shard:
    """The consecutive samples of one tar, which has the name that the reference gives it."""

    name: str
    rows: list[Row]


def prepare_coco(
    images: Path,
    captions: Path,
    output: Path,
    num_samples: int = NUM_SAMPLES,
    num_workers: int | None = None,
    force: bool = False,
    shard_size: int = SHARD_SIZE,
    stream: TextIO = sys.stderr,
    on_progress: OnProgress = lambda done, total: None,
) -> dict[str, Any]:
    """Make ``output`` from the folder ``images``, resuming an unfinished one; return the report.

    Raises DataError if ``captions`` is malformed, or an image is missing or unreadable.
    """
    rows = subset(read_annotations(captions), num_samples)
    table = tsv(rows)
    rows_hash = hashlib.sha256(table.encode()).hexdigest()
    settings = {**SETTINGS, "shard_size": shard_size, "rows": rows_hash}
    report = None if force else finished_report(output, settings)
    if report is None:
        paths = [image_path(images, row) for row in rows]
        _raise_for([f"{path}: missing" for path in paths if not path.is_file()], len(rows))
        with open_staging_dir(output, settings, force) as staging:
            shards = [
                Shard(f"shard_{index:05d}.tar", rows[start : start + shard_size])
                for index, start in enumerate(range(0, len(rows), shard_size))
            ]
            with ProgressBar("resize", len(rows), stream, on_progress=on_progress) as bar:
                _write_shards(images, shards, staging, num_workers, bar.advance)
            with atomic_write(staging.path / TSV) as partial:
                partial.write_text(table, encoding="utf-8")
            report = {"settings": settings, "samples": len(rows)}
            staging.finish(report)
    print(f"{output}: {report['samples']:,} samples", file=stream, flush=True)
    return report


def image_path(images: Path, row: Row) -> Path:
    return images / f"COCO_val2014_{row.image_id:012}.jpg"


def resize(content: bytes) -> bytes:
    """Return the image file ``content`` as a PNG of 256 x 256 pixels; the aspect ratio is not kept."""
    with Image.open(io.BytesIO(content), formats=("JPEG", "PNG")) as image:
        if image.width * image.height > _MAX_PIXELS:
            raise ValueError(f"{image.width} x {image.height} pixels")
        return encode(image.resize((SIZE, SIZE), Image.Resampling.BICUBIC))


def write_shard(shard: Shard, images: Path, staging: StagingDir) -> list[str]:
    """Write the tar of ``shard`` to ``staging`` unless it exists; return a line for each unreadable image.

    If there are any, no tar is written.
    """
    tar, scratch = staging.path / shard.name, staging.work / f"{shard.name}.{os.getpid()}"
    if tar.exists():
        return []
    faults = list[str]()
    with storage_errors(staging.path), TarWriter(scratch, shard_size=sys.maxsize) as writer:
        for row in shard.rows:
            try:
                image = resize(image_path(images, row).read_bytes())
            except Exception as error:  # on malformed bytes a decoder may raise anything
                faults.append(f"{image_path(images, row)}: {error_summary(error)}")
                continue
            writer.add(f"{row.image_id:012}", image, "png", row.caption, _metadata(row))
    with storage_errors(staging.path):
        for written in [] if faults else scratch.glob("*.tar"):
            written.replace(tar)
            open_index(tar)
        shutil.rmtree(scratch)
    return faults


def _write_shards(
    images: Path,
    shards: list[Shard],
    staging: StagingDir,
    num_workers: int | None,
    advance: Advance,
) -> None:
    write = partial(write_shard, images=images, staging=staging)
    faults = list[str]()
    with closing(map_in_order(write, shards, num_workers)) as faults_by_shard:
        for shard, shard_faults in zip(shards, faults_by_shard, strict=True):
            faults += shard_faults
            advance(len(shard.rows))
    _raise_for(faults, sum(len(shard.rows) for shard in shards))


def _metadata(row: Row) -> dict[str, Any]:
    return {
        "id": str(row.image_id),
        "caption": row.caption,
        "filename": f"COCO_val2014_{row.image_id:012}.png",
        "timestep": row.timestep,
    }


def _raise_for(faults: list[str], total: int) -> None:
    if not faults:
        return
    lines = [f"{len(faults):,} of {total:,} images cannot be read; none may be skipped"]
    lines += faults[:_MAX_FAULTS_SHOWN]
    if len(faults) > _MAX_FAULTS_SHOWN:
        lines.append(f"... and {len(faults) - _MAX_FAULTS_SHOWN:,} more")
    raise JoinedDataError(lines)
