"""COCO-2014's two archives: verified by name and SHA-1, downloaded if need be, and unpacked as far as needed.

    FOLDER/val2014.zip annotations_trainval2014.zip
    FOLDER/annotations/captions_val2014.json
    FOLDER/val2014/COCO_val2014_000000000042.jpg ...     the images of the subset

The SHA-1s are those of the reference's download script. zipfile verifies the CRC-32 of each member.
"""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from fluxtrain.errors import DataError
from fluxtrain.prepare.coco.subset import read_annotations, subset
from fluxtrain.prepare.download.file import fetch
from fluxtrain.prepare.download.manifest import Entry
from fluxtrain.prepare.staging_dir import storage_errors
from fluxtrain.remote.http import HttpClient

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
        _extract(folder / ANNOTATIONS, [_CAPTIONS], folder)
        rows = subset(read_annotations(folder / _CAPTIONS), num_samples)
        names = [f"val2014/COCO_val2014_{row.image_id:012}.jpg" for row in rows]
        _extract(folder / IMAGES, names, folder)
    return folder / "val2014", folder / _CAPTIONS


def _extract(archive: Path, names: Iterable[str], folder: Path) -> None:
    """Write the members ``names`` below ``folder``, unless they are there with the size of the archive's."""
    try:
        with zipfile.ZipFile(archive) as file:
            for name in names:
                target, size = folder / name, file.getinfo(name).file_size
                if target.is_file() and target.stat().st_size == size:
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                partial = target.with_name(f".{target.name}.{os.getpid()}")
                with file.open(name) as member, partial.open("wb") as out:
                    shutil.copyfileobj(member, out)
                partial.replace(target)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise DataError(f"{archive}: {error}") from None
