"""The cache of a folder's encodings: a file for each picture at each size, and one for each caption.

    folder/
      pictures/ID.json          what became of a picture: its latents, or why it cannot be used
      latents/ID.safetensors    mean, logvar [ch h w]
      masks/ID.safetensors      mask [h w], the weights of latents in the loss
      texts/ID.safetensors      txt [l d], vec [v]
      listings/ID.json          what a shard that was streamed holds

An ID is a hash of all that the content depends on, so a file that exists is right and whole; there is no
other state. A picture is known by name, size and modification time; if one of them changed, it is read again,
but encoded again only if its bytes changed. Files that nothing refers to any more are left: the folder may be
shared by several runs, and may be deleted between runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fluxtrain.data.buckets import Placement
from fluxtrain.data.pictures.picture import DECODER
from fluxtrain.data.pictures.subset import TrainingPicture
from fluxtrain.data.shard_writer import sample_views, save_aligned
from fluxtrain.files import atomic_write_by_several, sync

FORMAT = 1
CRC = "crc32"
FOLDERS = ("pictures", "latents", "masks", "texts", "listings")
_ID_DIGITS = 32


@dataclass(frozen=True)
class Latents:
    """The latents of a picture at one size in pixels, cropped and mirrored in one way."""

    id: str
    width: int
    height: int
    sample: int = 0
    """Number of the size: latents of the same one are variants of one sample."""
    mask: str = ""
    """ID of its mask, "" if it has none."""


@dataclass(frozen=True)
class Record:
    """What became of a picture: its size and its latents, or a fault."""

    name: str
    sha256: str = ""
    width: int = 0
    height: int = 0
    latents: tuple[Latents, ...] = ()
    fault: str = ""
    mask_sha256: str = ""
    """Of the file of which its mask is made."""


@dataclass(frozen=True)
class PictureCache:
    """A cache folder; ``images`` and ``texts`` say what encodes, and are part of the IDs.

    ``sizes`` says what else the latents of a picture depend on: those of its record.
    """

    folder: Path
    images: str
    texts: str
    sizes: str = ""

    def record_path(self, picture: TrainingPicture) -> Path:
        """Return the file of what became of ``picture``."""
        file = picture.file
        known = [str(picture.path), file.size, file.modified]
        own = [self.sizes, picture.resolution, picture.variants.flip, picture.variants.crops]
        if picture.mask_path is not None:
            mask = picture.mask or file
            own += [str(picture.mask_path), mask.size, mask.modified]
        return self.folder / "pictures" / f"{_digest(self.images, *known, *own)}.json"

    def latents_id(self, sha256: str, placement: Placement) -> str:
        """Return the ID of the latents, at ``placement``, of the picture whose bytes have ``sha256``."""
        changed = [placement.corner, placement.is_flipped]
        return _digest(
            self.images,
            sha256,
            placement.size,
            placement.resized,
            *(changed if any(changed) else ()),
        )

    def mask_id(self, kind: str, sha256: str, placement: Placement) -> str:
        """Return the ID of the mask that is made of the bytes with ``sha256``, at ``placement``."""
        changed = [placement.corner, placement.is_flipped]
        return _digest("mask", DECODER, kind, sha256, placement.size, placement.resized, *changed)

    def mask_path(self, mask_id: str) -> Path:
        """Return the file of a mask."""
        return self.folder / "masks" / f"{mask_id}.safetensors"

    def latents_path(self, latents_id: str) -> Path:
        """Return the file of latents."""
        return self.folder / "latents" / f"{latents_id}.safetensors"

    def text_path(self, caption: str) -> Path:
        """Return the file of the encodings of ``caption``."""
        return self.folder / "texts" / f"{_digest(self.texts, caption)}.safetensors"

    def listing_path(self, key: str) -> Path:
        """Return the file of what the shard that is known by ``key`` holds."""
        return self.folder / "listings" / f"{_digest('listing', key)}.json"

    def make_folders(self) -> None:
        """Create the folders."""
        for name in FOLDERS:
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    def existing(self) -> set[str]:
        """Return the names of all files, each with its folder."""
        names = set[str]()
        for folder in FOLDERS:
            path = self.folder / folder
            if path.is_dir():
                names |= {f"{folder}/{name}" for name in os.listdir(path)}
        return names

    def read_record(self, picture: TrainingPicture) -> Record | None:
        """Return what became of ``picture``, None if it was not looked at or the record is damaged."""
        try:
            values = json.loads(self.record_path(picture).read_text())
            latents = tuple(Latents(**each) for each in values.pop("latents"))
            return Record(**values, latents=latents)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def write_record(self, picture: TrainingPicture, record: Record) -> None:
        """Write what became of ``picture``, after its latents."""
        values = {**vars(record), "latents": [vars(each) for each in record.latents]}
        with atomic_write_by_several(self.record_path(picture)) as partial:
            partial.write_text(json.dumps(values, indent=1, ensure_ascii=False))
            sync(partial)


def write_encodings(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write ``tensors`` with their CRC-32 to ``path``, whole or not at all."""
    stored = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    crc = np.array([checksum(stored)], dtype=np.uint32).view(np.int32)
    with atomic_write_by_several(path) as partial:
        save_aligned(partial, {**stored, CRC: torch.from_numpy(crc)})
        sync(partial)


def checksum(tensors: dict[str, Tensor]) -> int:
    """Return the CRC-32 of ``tensors`` in their order."""
    crc = 0
    for tensor in tensors.values():
        (view,) = sample_views(tensor.unsqueeze(0))
        crc = zlib.crc32(view, crc)
    return crc


def _digest(*parts: Any) -> str:
    text = json.dumps([FORMAT, *parts])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_ID_DIGITS]
