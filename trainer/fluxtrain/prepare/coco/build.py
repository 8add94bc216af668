"""COCO-2014 for MLPerf: the validation subset in tars, images resized to 256 x 256, with its timesteps.

    OUTPUT/shard_00000.tar …    key image_id; .png, .txt and .json, which holds the timestep
    OUTPUT/val2014_30k.tsv      image_id, id, caption, timestep
    OUTPUT/report.json

An unreadable image is an error: the reference would skip it and evaluate on fewer samples.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import sys
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from PIL import Image

from fluxtrain.data.tar.index import open_index
from fluxtrain.data.tar.writer import TarWriter
from fluxtrain.errors import JoinedDataError
from fluxtrain.files import atomic_write
from fluxtrain.prepare.coco.subset import NUM_SAMPLES, Row, read_annotations, subset, tsv
from fluxtrain.prepare.image import SETTINGS, SIZE, encode, error_summary
from fluxtrain.prepare.progress import Advance, OnProgress, progress_bar
from fluxtrain.prepare.staging_dir import (
    StagingDir,
    finished_report,
    open_staging_dir,
    storage_errors,
)
from fluxtrain.prepare.worker_pool import available_cores, map_in_order

SHARD_SIZE = 1000
TSV = "val2014_30k.tsv"
_MAX_PIXELS = 1 << 26
_MAX_FAULTS_SHOWN = 10


@dataclass(frozen=True)
class Shard:
    """The consecutive samples of one tar."""

    index: int
    rows: list[Row]

    @property
    def name(self) -> str:
        """Return the name that the reference gives the tar."""
        return f"shard_{self.index:05d}.tar"


def prepare_coco(
    images: Path,
    captions: Path,
    output: Path,
    num_samples: int = NUM_SAMPLES,
    num_workers: int | None = None,
    force: bool = False,
    shard_size: int = SHARD_SIZE,
    stream: TextIO = sys.stderr,
    on_progress: OnProgress | None = None,
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
            starts = range(0, len(rows), shard_size)
            shards = [Shard(i, rows[at : at + shard_size]) for i, at in enumerate(starts)]
            with progress_bar("resize", len(rows), stream, on_progress) as advance:
                _write_shards(images, shards, staging, num_workers or available_cores(), advance)
            with atomic_write(staging.path / TSV) as partial:
                partial.write_text(table, encoding="utf-8")
            report = {"settings": settings, "samples": len(rows)}
            staging.finish(report)
    print(f"{output}: {report['samples']:,} samples", file=stream, flush=True)
    return report


def image_path(images: Path, row: Row) -> Path:
    """Return the path of the image of ``row`` in COCO's archive."""
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
    images: Path, shards: list[Shard], staging: StagingDir, num_workers: int, advance: Advance
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
    """Raise DataError with the first of ``faults``, if there are any."""
    if not faults:
        return
    lines = [f"{len(faults):,} of {total:,} images cannot be read; none may be skipped"]
    lines += faults[:_MAX_FAULTS_SHOWN]
    if len(faults) > _MAX_FAULTS_SHOWN:
        lines.append(f"... and {len(faults) - _MAX_FAULTS_SHOWN:,} more")
    raise JoinedDataError(lines)
