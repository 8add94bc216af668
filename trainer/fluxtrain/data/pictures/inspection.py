"""Looks at all pictures of a folder as a training would: what it uses, changes and leaves out."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from fluxtrain.contract.run.data import DataConfig
from fluxtrain.data.pictures.folder import Listing, PictureFile
from fluxtrain.data.pictures.picture import (
    PictureError,
    decode,
    picture_size,
    read_bytes,
    require_enough_pixels,
)
from fluxtrain.data.pictures.placement import placements

THUMBNAIL = 128
"""Longest side of a thumbnail in pixels."""
_MUCH_CROPPED = 0.6
"""Part of a picture that is seen, below which it is named."""


@dataclass(frozen=True)
class Look:
    """What a training makes of one picture."""

    file: PictureFile
    width: int = 0
    height: int = 0
    sha256: str = ""
    scale: float = 1.0
    """Factor by which it is resized; above 1 it is enlarged."""
    seen: float = 1.0
    """Part of its area that is left after the crop."""
    fault: str = ""
    thumbnail: Image.Image | None = None
    """The part that is seen."""


@dataclass(frozen=True)
class Inspection:
    """What a training makes of a folder."""

    listing: Listing
    looks: list[Look]
    image_size: int

    @property
    def used(self) -> list[Look]:
        """Return the pictures that are used."""
        return [look for look in self.looks if not look.fault]

    @property
    def skipped(self) -> dict[str, str]:
        """Return the names of the files that are not used, with the reason."""
        faults = {look.file.name: look.fault for look in self.looks if look.fault}
        return dict(sorted((self.listing.skipped | faults).items()))

    @property
    def enlarged(self) -> list[Look]:
        """Return the pictures that have fewer pixels than they are trained with, the smallest first."""
        found = (look for look in self.used if look.scale > 1)
        return sorted(found, key=lambda look: -look.scale)

    @property
    def much_cropped(self) -> list[Look]:
        """Return the pictures of which much is not seen, the least seen first."""
        found = (look for look in self.used if look.seen < _MUCH_CROPPED)
        return sorted(found, key=lambda look: look.seen)

    @property
    def without_caption(self) -> list[Look]:
        """Return the pictures that have no caption."""
        return [look for look in self.used if not look.file.caption]

    @property
    def equal(self) -> list[list[Look]]:
        """Return groups of pictures that have the same bytes."""
        groups = dict[str, list[Look]]()
        for look in self.used:
            groups.setdefault(look.sha256, []).append(look)
        return [group for group in groups.values() if len(group) > 1]

    def kinds(self) -> Counter[str]:
        """Return how many of the pictures that are used have each file suffix."""
        return Counter(Path(look.file.name).suffix.lower() for look in self.used)


def inspect(
    listing: Listing,
    image_size: int,
    threads: int,
    advance: Callable[[], object] = lambda: None,
) -> Inspection:
    """Return what a training at ``image_size`` makes of the pictures of ``listing``; all are decoded.

    ``advance`` is called after each picture.
    """
    looks = list[Look]()
    for look in _looks(listing, image_size, threads):
        looks.append(look)
        advance()
    return Inspection(listing, looks, image_size)


def _looks(listing: Listing, image_size: int, threads: int) -> Iterator[Look]:
    config = DataConfig(image_size=image_size)
    with ThreadPoolExecutor(threads, thread_name_prefix="picture") as pool:
        yield from pool.map(lambda file: _look(listing.folder, file, config), listing.pictures)


def _look(folder: Path, file: PictureFile, config: DataConfig) -> Look:
    try:
        content = read_bytes(folder / file.name)
        width, height = picture_size(content)
        placement = placements(width, height, config)[0]
        require_enough_pixels(width, height, placement)
        scale = THUMBNAIL / max(placement.size)
        wanted = tuple(max(1, round(side * scale)) for side in placement.resized)
        image = decode(content, at_least=(wanted[0], wanted[1]))
    except PictureError as error:
        return Look(file, fault=str(error))
    except OSError as error:
        return Look(file, fault=error.strerror or "cannot be read")
    resized, size = placement.resized, placement.size
    return Look(
        file,
        width,
        height,
        hashlib.sha256(content).hexdigest(),
        scale=max(resized[0] / width, resized[1] / height),
        seen=size[0] * size[1] / (resized[0] * resized[1]),
        thumbnail=_thumbnail(image, resized, placement.box),
    )


def _thumbnail(
    image: Image.Image, resized: tuple[int, int], box: tuple[int, int, int, int]
) -> Image.Image:
    """Return the part ``box`` of ``image``, which stands for one of size ``resized``, as a thumbnail."""
    ratio = image.width / resized[0], image.height / resized[1]
    left, top, right, bottom = (side * ratio[axis % 2] for axis, side in enumerate(box))
    part = image.crop((round(left), round(top), max(1, round(right)), max(1, round(bottom))))
    part.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.BICUBIC)
    return part
