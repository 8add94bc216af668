"""Reads a picture with its mask, and says how it is brought to the sizes at which it is trained."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from fluxtrain.contract.run.data import DataConfig
from fluxtrain.data.buckets import Placement
from fluxtrain.data.pictures.picture import (
    PictureError,
    picture_size,
    read_bytes,
    require_enough_pixels,
)
from fluxtrain.data.pictures.placement import placements
from fluxtrain.data.pictures.subset import TrainingPicture
from fluxtrain.data.pictures.variants import variant_placements

FAULTS = (PictureError, FileNotFoundError, PermissionError, IsADirectoryError)
"""Errors that belong to one file; others, such as those of a lost volume, end the run."""


@dataclass(frozen=True)
class ReadPicture:
    """The files of a picture and of its mask, of which nothing is decoded yet."""

    content: bytes
    sha256: str
    width: int
    height: int
    placements: tuple[tuple[int, Placement], ...]
    """How it is placed for each of its latents, with the number of the size."""
    mask: bytes | None = None
    mask_sha256: str = ""


def read_picture(picture: TrainingPicture, data: DataConfig, seed: int) -> ReadPicture:
    """Return the files of ``picture`` and its placements; one of FAULTS if it cannot be trained."""
    content = read_bytes(picture.path)
    width, height = picture_size(content)
    sha256 = hashlib.sha256(content).hexdigest()
    path = picture.mask_path
    mask = None if path is None else read_bytes(path)
    found = placements_of(picture, data, seed, width, height, sha256)
    for _, placement in found:
        require_enough_pixels(width, height, placement)
    mask_sha256 = "" if mask is None else hashlib.sha256(mask).hexdigest()
    return ReadPicture(content, sha256, width, height, found, mask, mask_sha256)


def placements_of(
    picture: TrainingPicture, data: DataConfig, seed: int, width: int, height: int, sha256: str
) -> tuple[tuple[int, Placement], ...]:
    """Return how ``picture``, of ``width`` x ``height`` pixels, is placed, with the number of the size.

    Raises PictureError if it is too small for any bucket.
    """
    places = placements(width, height, data, picture.resolution)
    return tuple(
        (number, each)
        for number, placement in enumerate(places)
        for each in variant_placements(placement, picture.variants, seed, sha256)
    )


def reason_of(error: Exception) -> str:
    """Return why a picture cannot be used, of one of FAULTS."""
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return reason or type(error).__name__
