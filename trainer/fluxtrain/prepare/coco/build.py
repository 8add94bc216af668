"""COCO-2014 for MLPerf: the validation subset, its pictures resized to 256 x 256, in tars with its timesteps.

    OUTPUT/shard_00000.tar …    image_id as key; .png, .txt and .json, which holds the timestep
    OUTPUT/val2014_30k.tsv      image_id, id, caption, timestep
    OUTPUT/report.json

An image that cannot be read ends the preparation: the reference would leave it out and evaluate on fewer.
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

import PIL
from PIL import Image

from fluxtrain.data.tar.index import open_index
from fluxtrain.data.tar.writer import TarWriter
from fluxtrain.errors import DataError
from fluxtrain.files import atomic_write
from fluxtrain.prepare.coco.subset import NUM_SAMPLES, Row, read_annotations, subset, tsv
from fluxtrain.prepare.image import PNG_LEVEL, SIZE, encode, error_summary
from fluxtrain.prepare.openmoji.cached_build import Advance, Follow, progress
from fluxtrain.prepare.staging_dir import (
    Settings,
    StagingDir,
    finished_report,
    open_staging_dir,
    storage_errors,
)
from fluxtrain.prepare.worker_pool import available_cores, map_in_order

SHARD_SIZE = 1000
TSV = "val2014_30k.tsv"
_FORMAT = 1
_MAX_PIXELS = 1 << 26
_MOST_SHOWN = 10


@dataclass(frozen=True)
class Shard:
    """Consecutive samples that make one tar."""

    number: int
    rows: list[Row]

    @property
    def name(self) -> str:
        """Return the tar's name, as the reference gives it."""
        return f"shard_{self.number:05d}.tar"


def prepare_coco(
    images: Path,
    captions: Path,
    output: Path,
    num_samples: int = NUM_SAMPLES,
    num_workers: int | None = None,
    force: bool = False,
    shard_size: int = SHARD_SIZE,
    stream: TextIO = sys.stderr,
    follow: Follow | None = None,
) -> dict[str, Any]:
    """Make ``output`` of the pictures in ``images``, or go on where it was left; return the report.

    ``follow`` hears how many pictures are done of how many.
    Raises DataError where ``captions`` is malformed, or an image is missing or unreadable.
    """
    rows = subset(read_annotations(captions), num_samples)
    table = tsv(rows)
    settings: Settings = {
        "format": _FORMAT,
        "size": SIZE,
        "png_level": PNG_LEVEL,
        "pillow": PIL.__version__,
        "shard_size": shard_size,
        "rows": hashlib.sha256(table.encode()).hexdigest(),
    }
    report = None if force else finished_report(output, settings)
    if report is None:
        _refuse([fault for row in rows if (fault := _missing(images, row))], len(rows))
        with open_staging_dir(output, settings, force) as draft:
            starts = range(0, len(rows), shard_size)
            shards = [Shard(i, rows[at : at + shard_size]) for i, at in enumerate(starts)]
            with progress("resize", len(rows), stream, follow) as advance:
                _write_shards(images, shards, draft, num_workers or available_cores(), advance)
            with atomic_write(draft.folder / TSV) as partial:
                partial.write_text(table, encoding="utf-8")
            report = {"settings": settings, "samples": len(rows)}
            draft.finish(report)
    print(f"{output}: {report['samples']:,} samples", file=stream, flush=True)
    return report


def image_path(images: Path, row: Row) -> Path:
    """Return where COCO's archive has the picture of ``row``."""
    return images / f"COCO_val2014_{row.image_id:012}.jpg"


def resize(content: bytes) -> bytes:
    """Return the image file ``content`` as PNG of 256 x 256 pixels, whatever its shape was."""
    with Image.open(io.BytesIO(content), formats=("JPEG", "PNG")) as image:
        if image.width * image.height > _MAX_PIXELS:
            raise ValueError(f"{image.width} x {image.height} pixels")
        return encode(image.resize((SIZE, SIZE), Image.Resampling.BICUBIC))


def write_shard(shard: Shard, images: Path, draft: StagingDir) -> list[str]:
    """Write the tar of ``shard`` into ``draft``, unless it is there; return what is wrong with images.

    With anything wrong there is no tar.
    """
    tar, making = draft.folder / shard.name, draft.work / f"{shard.name}.{os.getpid()}"
    if tar.exists():
        return []
    faults = list[str]()
    with storage_errors(draft.folder), TarWriter(making, shard_size=sys.maxsize) as writer:
        for row in shard.rows:
            try:
                picture = resize(image_path(images, row).read_bytes())
            except Exception as error:  # a decoder of hostile bytes may raise anything
                faults.append(f"{image_path(images, row)}: {error_summary(error)}")
                continue
            writer.add(f"{row.image_id:012}", picture, "png", row.caption, _metadata(row))
    with storage_errors(draft.folder):
        for made in [] if faults else making.glob("*.tar"):
            made.replace(tar)
            open_index(tar)
        shutil.rmtree(making)
    return faults


def _write_shards(
    images: Path, shards: list[Shard], draft: StagingDir, num_workers: int, advance: Advance
) -> None:
    total = sum(len(shard.rows) for shard in shards)
    write = partial(write_shard, images=images, draft=draft)
    faults = list[str]()
    with closing(map_in_order(write, shards, num_workers)) as written:
        for shard, found in zip(shards, written, strict=True):
            faults += found
            advance(len(shard.rows))
    _refuse(faults, total)


def _metadata(row: Row) -> dict[str, Any]:
    filename = f"COCO_val2014_{row.image_id:012}.png"
    return {
        "id": str(row.image_id),
        "caption": row.caption,
        "filename": filename,
        "timestep": row.timestep,
    }


def _missing(images: Path, row: Row) -> str | None:
    path = image_path(images, row)
    return None if path.is_file() else f"{path}: missing"


def _refuse(faults: list[str], total: int) -> None:
    if not faults:
        return
    lines = [f"{len(faults):,} of {total:,} images cannot be read; none is left out in silence"]
    lines += faults[:_MOST_SHOWN]
    if len(faults) > _MOST_SHOWN:
        lines.append(f"... and {len(faults) - _MOST_SHOWN:,} more")
    raise DataError("\n".join(lines))
