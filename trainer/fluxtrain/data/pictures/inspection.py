"""Looks at all pictures of a run as its training would: what it uses, changes and leaves out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from fluxtrain.contract.run.buckets import Size
from fluxtrain.contract.run.data import ALPHA, DataConfig
from fluxtrain.data.buckets import Placement
from fluxtrain.data.pictures.folder import texts_beside
from fluxtrain.data.pictures.masks import mask_of
from fluxtrain.data.pictures.picture import decode
from fluxtrain.data.pictures.reading import FAULTS, ReadPicture, read_picture, reason_of
from fluxtrain.data.pictures.subset import TrainingPicture

THUMBNAIL = 128
"""Longest side of a thumbnail in pixels."""
_MUCH_CROPPED = 0.6
"""Part of a picture that is seen, below which it is named."""


@dataclass(frozen=True)
class Look:
    """What a training makes of one picture."""

    picture: TrainingPicture
    width: int = 0
    height: int = 0
    sha256: str = ""
    placements: tuple[tuple[int, Placement], ...] = ()
    """As `ReadPicture` has them."""
    fault: str = ""
    texts: tuple[str, ...] = ()
    """Names of the text files beside it, of which the first with a caption is used."""
    thumbnail: Image.Image | None = None
    """The part that is seen, at the first size."""

    @property
    def name(self) -> str:
        """Return the name of the picture in reports."""
        return self.picture.label

    @property
    def sizes(self) -> tuple[Size, ...]:
        """Return width and height in pixels of its samples, one for each resolution."""
        return tuple({number: each.size for number, each in self.placements}.values())

    @property
    def scale(self) -> float:
        """Return the largest factor by which it is resized; above 1 it is enlarged."""
        found = (p.resized[0] / self.width for _, p in self.placements)
        other = (p.resized[1] / self.height for _, p in self.placements)
        return max(*found, *other)

    @property
    def seen(self) -> float:
        """Return the smallest part of its area that is left after a crop."""
        return min(
            p.size[0] * p.size[1] / (p.resized[0] * p.resized[1]) for _, p in self.placements
        )


@dataclass(frozen=True)
class Inspection:
    """What a training makes of its pictures."""

    looks: list[Look]
    left_out: Mapping[str, str]
    """Files that are not looked at, with the reason."""

    @property
    def used(self) -> list[Look]:
        """Return the pictures that are used."""
        return [look for look in self.looks if not look.fault]

    @property
    def skipped(self) -> dict[str, str]:
        """Return the names of the files that are not used, with the reason."""
        faults = {look.name: look.fault for look in self.looks if look.fault}
        return dict(sorted((dict(self.left_out) | faults).items()))

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
        """Return the pictures that have no caption of their own."""
        return [look for look in self.used if not look.picture.file.caption]

    @property
    def several_texts(self) -> list[Look]:
        """Return the pictures that have more than one text file."""
        return [look for look in self.used if len(look.texts) > 1]

    def long_captions(self, length: int) -> list[Look]:
        """Return the pictures whose captions have more than ``length`` words, and so even more tokens."""
        return [look for look in self.used if len(look.picture.caption.split()) > length]

    @property
    def equal(self) -> list[list[Look]]:
        """Return groups of pictures that have the same bytes."""
        groups = dict[str, list[Look]]()
        for look in self.used:
            groups.setdefault(look.sha256, []).append(look)
        return [group for group in groups.values() if len(group) > 1]

    def samples(self, held_out: frozenset[str] = frozenset()) -> Counter[Size]:
        """Return the samples of an epoch by width and height in pixels, the most pixels first.

        Those of ``held_out``, by their hashes, are no samples of the training.
        """
        found = Counter[Size]()
        for look in (look for look in self.used if look.sha256 not in held_out):
            for size in look.sizes:
                found[size] += look.picture.repeats
        return Counter(
            dict(sorted(found.items(), key=lambda each: (-each[0][0] * each[0][1], each[0])))
        )

    def kinds(self) -> Counter[str]:
        """Return how many of the pictures that are used have each file suffix."""
        return Counter(Path(look.picture.file.name).suffix.lower() for look in self.used)


def inspect(
    pictures: Sequence[TrainingPicture],
    left_out: Mapping[str, str],
    data: DataConfig,
    seed: int,
    threads: int,
    advance: Callable[[], object] = lambda: None,
    decodes: bool = True,
) -> Inspection:
    """Return what a training with ``data`` makes of ``pictures``; it ``decodes`` all, and their masks.

    ``advance`` is called after each picture.
    """
    looks = list[Look]()
    for look in _looks(pictures, data, seed, threads, decodes):
        looks.append(look)
        advance()
    return Inspection(looks, left_out)


def _looks(
    pictures: Sequence[TrainingPicture], data: DataConfig, seed: int, threads: int, decodes: bool
) -> Iterator[Look]:
    with ThreadPoolExecutor(threads, thread_name_prefix="picture") as pool:
        yield from pool.map(lambda picture: _look(picture, data, seed, decodes), pictures)


def _look(picture: TrainingPicture, data: DataConfig, seed: int, decodes: bool) -> Look:
    try:
        read = read_picture(picture, data, seed)
        kind = ALPHA if picture.has_alpha_mask else ""
        for _, each in read.placements if decodes and read.mask is not None else ():
            assert read.mask is not None
            mask_of(read.mask, kind, (read.width, read.height), each)
        thumbnail = _thumbnail(read) if decodes else None
    except FAULTS as error:
        return Look(picture, fault=reason_of(error))
    return Look(
        picture,
        read.width,
        read.height,
        read.sha256,
        read.placements,
        texts=tuple(path.name for path in texts_beside(picture.path)),
        thumbnail=thumbnail,
    )


def _thumbnail(read: ReadPicture) -> Image.Image:
    """Return the part of a picture that is seen at its first size, as a thumbnail."""
    _, placement = read.placements[0]
    scale = THUMBNAIL / max(placement.size)
    width, height = (max(1, round(side * scale)) for side in placement.resized)
    image = decode(read.content, at_least=(width, height))
    ratio = image.width / placement.resized[0], image.height / placement.resized[1]
    left, top, right, bottom = (side * ratio[axis % 2] for axis, side in enumerate(placement.box))
    part = image.crop((round(left), round(top), max(1, round(right)), max(1, round(bottom))))
    part.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.BICUBIC)
    return part
