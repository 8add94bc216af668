"""Folders of pictures with the settings of their samples: repeats and what is added to captions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.data import ALPHA, AS_THEY_ARE, DataConfig, Size, VariantsConfig
from fluxtrain.contract.run.model import Condition
from fluxtrain.data.order import Placement
from fluxtrain.data.pictures.faults import LEFT_OUT, read_faults
from fluxtrain.data.pictures.folder import Listing, PictureFile, list_pictures
from fluxtrain.data.pictures.kohya_config import (
    Subset,
    is_dataset_config,
    masks_at,
    masks_of_run,
    own_batch_sizes,
    read_dataset_config,
    repeats_note,
    source_of,
)
from fluxtrain.data.pictures.picture import (
    PictureError,
    mask_files,
    partners,
    picture_size,
    placements,
    read_bytes,
    require_enough_pixels,
    variant_placements,
    with_masks,
)
from fluxtrain.errors import ConfigError, DataError, redacted
from fluxtrain.runtime.draws import NUM_TIMESTEPS

Places = Mapping[str, Path | Listing]
"""Folders of this node with what was fetched, by URL, or what was listed of those that are streamed."""


@dataclass(frozen=True)
class TrainingPicture:
    """A picture as it is trained."""

    folder: Path
    file: PictureFile
    caption: str
    repeats: int
    label: str
    """Its name in reports."""
    resolution: int | None = None
    """Square root of the number of pixels; None: those of the run."""
    variants: VariantsConfig = AS_THEY_ARE
    """What is made of it and of its caption."""
    mask: PictureFile | None = None
    masks: Path | None = None
    has_alpha_mask: bool = False
    weight: float = 1.0
    """Of its loss."""
    is_reg: bool = False
    """Whether it is a regularisation image."""
    is_streamed: bool = False
    """Whether its file is not there any more once it is encoded."""
    control: PictureFile | None = None
    """What the model's condition is made of; None: its hole is drawn."""
    controls: Path | None = None
    takes: Condition | None = None

    @property
    def path(self) -> Path:
        return self.folder / self.file.name

    @property
    def mask_path(self) -> Path | None:
        """Return the file of which its mask is made, None if it has no mask."""
        if self.has_alpha_mask:
            return self.path
        return self.masks / self.mask.name if self.masks and self.mask else None

    @property
    def mask_kind(self) -> str:
        """Return ALPHA if its own opacity is its mask, else ""."""
        return ALPHA if self.has_alpha_mask else ""

    @property
    def control_path(self) -> Path | None:
        """Return the file of its control, None if it has none."""
        return self.controls / self.control.name if self.controls and self.control else None


def subsets(config: DataConfig, data_root: Path) -> list[Subset]:
    """Return the folders of ``config.images``, which may be kohya's data set config."""
    assert config.images is not None
    folder = data_root / config.images
    options = config.repeats, config.caption_prefix, config.class_tokens
    variants = config.variants or AS_THEY_ARE
    url = source_of(config.images, folder)
    if not url and is_dataset_config(folder) and not folder.is_dir():
        return read_dataset_config(folder, config, data_root)
    masks = masks_at(masks_of_run(config), data_root)
    has_alpha = config.masks == ALPHA
    return [
        Subset(folder, *options, url=url, variants=variants, **masks, has_alpha_masks=has_alpha)
    ]


def batch_size_note(config: DataConfig, data_root: Path, global_batch_size: int) -> str:
    """Return that the data set config of ``config`` names another batch size than the run's, else ""."""
    path = data_root / str(config.images)
    if not (is_dataset_config(path) and path.is_file()):
        return ""
    other = [size for size in own_batch_sizes(path) if size != global_batch_size]
    given = " and ".join(map(str, other))
    text = f"{config.images}: its batch_size of {given} is not read: a step has {global_batch_size} samples"
    return f"{text}, spec.run.schedule.global_batch_size" if other else ""


def notes(config: DataConfig, data_root: Path, global_batch_size: int) -> list[str]:
    """Return what of the pictures of ``config`` is not read, of kohya's settings of the training."""
    batch_size = batch_size_note(config, data_root, global_batch_size)
    return [note for note in (batch_size, repeats_note(config, data_root)) if note]


def remote_sources(config: DataConfig, data_root: Path) -> list[tuple[str, str]]:
    """Return the URLs of pictures and of masks, each once, with the field that names it."""
    listed = subsets(config, data_root)
    found = {subset.masks_url: subset.masks_field for subset in listed if subset.masks_url}
    found = {subset.url: subset.field for subset in listed if subset.url} | found
    return [(field, url) for url, field in found.items()]


def streamed_urls(config: DataConfig, data_root: Path) -> set[str]:
    """Return the URLs of pictures that are streamed: masks are not."""
    listed = subsets(config, data_root) if config.download.stream else []
    return {each.url for each in listed if each.url} - {each.masks_url for each in listed}


def list_subsets(
    config: DataConfig, data_root: Path, places: Places | None = None
) -> list[tuple[Subset, Listing]]:
    """Return the pictures of each folder of ``config.images``; DataError if one holds none.

    ``places`` has the folders of URLs; without it those are left out, and so are masks at URLs.
    """
    images = data_root / str(config.images)
    is_config = is_dataset_config(images) and images.is_file()
    hint = f"; {images if is_config else 'spec.run.data.images'} names it"
    listed = list[tuple[Subset, Listing]]()
    for subset in subsets(config, data_root):
        if subset.url and places is None:
            if subset.masks is not None and not subset.masks_url:
                mask_files(subset.masks, data_root)  # an error in them is told before a fetch
            continue
        if subset.url:
            place = (places or {})[subset.url]
            listing = _fetched_listing(subset.url, place, config.caption_encoding)
        else:
            encoding = config.caption_encoding
            listing = list_pictures(subset.folder, hint, data_root, encoding=encoding)
        if subset.masks_url and places is None:
            listed.append((subset, listing))
            continue
        local = local_subset(subset, places or {}, listing.folder)
        masks = None if local.masks is None else mask_files(local.masks, data_root)
        listed.append((local, with_masks(listing, masks, local.masks_place)))
    return listed


def _fetched_listing(url: str, place: Path | Listing, encoding: str) -> Listing:
    if isinstance(place, Listing):
        return place
    faults = read_faults(place)
    with errors_of(url, place):
        hint, may_be_empty = f"; {redacted(url)}", bool(faults)
        listing = list_pictures(place, hint, may_be_empty=may_be_empty, encoding=encoding)
    listing.skipped.update(faults)
    listing.left_out.update(read_faults(place, LEFT_OUT))
    return listing


@contextmanager
def errors_of(url: str, place: Path) -> Iterator[None]:
    """Name ``url`` in errors instead of ``place``, the folder to which it was fetched."""
    try:
        yield
    except DataError as error:
        raise DataError(str(error).replace(str(place), redacted(url))) from None


def local_subset(subset: Subset, places: Places, folder: Path) -> Subset:
    """Return ``subset`` with its pictures in ``folder``, and its masks where they were fetched to."""
    masks = places[subset.masks_url] if subset.masks_url else subset.masks
    assert not isinstance(masks, Listing)
    return replace(subset, folder=folder, masks=masks)


def training_pictures(listed: list[tuple[Subset, Listing]]) -> list[TrainingPicture]:
    """Return the pictures of all folders, in their order; regularisation images come last.

    Those are repeated until they are as many samples as the others, the first ones once more than the last.
    """
    every = [each for subset, listing in listed for each in pictures_of(subset, listing)]
    trained = [each for each in every if not each.is_reg]
    others = [each for each in every if each.is_reg]
    wanted = sum(picture.repeats for picture in trained)
    return trained + _repeated(others, wanted)


class Found(NamedTuple):
    """What a run's folders hold."""

    pictures: list[TrainingPicture]
    skipped: dict[str, str]
    """Files that are no pictures to train on, with the reason."""
    left_out: dict[str, str]
    """Files and folders that are no pictures of the user's, with the reason."""


def find_pictures(config: RunConfig, data_root: Path, places: Places | None = None) -> Found:
    """Return the pictures of ``config`` with their controls; ``places`` is as in `list_subsets`.

    Controls have the names of pictures, with any suffix, in several folders those of reports; pictures
    without one are skipped.
    """
    listed = list_subsets(config.data, data_root, places)
    every = [replace(each, takes=config.model.takes) for each in training_pictures(listed)]
    skipped, left_out = dict[str, str](), dict[str, str]()
    for subset, listing in listed:
        skipped |= {subset.label + name: why for name, why in listing.skipped.items()}
        left_out |= {subset.label + name: why for name, why in listing.left_out.items()}
    if config.data.controls is None:
        return Found(every, skipped, left_out)
    folder, found = data_root / config.data.controls, list[TrainingPicture]()
    files = mask_files(folder, data_root, hint="; spec.run.data.controls names it")
    is_one = len({picture.folder for picture in every}) == 1
    names = [picture.file.name if is_one else picture.label for picture in every]
    controls = partners(names, files)
    for picture, name in zip(every, names, strict=True):
        if control := controls.get(name):
            found.append(replace(picture, control=control, controls=folder))
        else:
            skipped[picture.label] = f"has no control in {folder}"
    taken = {control.name for control in controls.values()}
    unused = (file.name for file in files if file.name not in taken)
    left_out |= {str(folder / name): "is the control of no picture" for name in unused}
    return Found(found, skipped, left_out)


def pictures_of(subset: Subset, listing: Listing) -> list[TrainingPicture]:
    """Return the pictures of ``listing`` as those of ``subset`` are trained."""
    return [
        TrainingPicture(
            subset.folder,
            file,
            subset.caption(file),
            subset.repeats,
            subset.label + file.name,
            subset.resolution,
            subset.variants,
            listing.masks.get(file.name),
            subset.masks,
            subset.has_alpha_masks,
            subset.weight,
            subset.is_reg,
            listing.is_streamed,
        )
        for file in listing.pictures
    ]


def _repeated(pictures: list[TrainingPicture], wanted: int) -> list[TrainingPicture]:
    """Return as many of ``pictures`` as are ``wanted`` samples, with more repeats if they are too few."""
    kept, count = list[TrainingPicture](), 0
    for picture in pictures:
        if count < wanted:
            kept.append(picture)
            count += picture.repeats
    if not kept:
        return []
    more, rest = divmod(max(0, wanted - count), len(kept))
    return [
        replace(picture, repeats=picture.repeats + more + (number < rest))
        for number, picture in enumerate(kept)
    ]


FAULTS = (PictureError, FileNotFoundError, PermissionError, IsADirectoryError)
"""Errors that belong to one file; others, such as those of a lost volume, end the run."""


@dataclass(frozen=True)
class ReadPicture:
    """The files of a picture and of its mask, of which nothing is decoded yet."""

    content: bytes
    sha256: str
    """Of its bytes, and of those of its control."""
    width: int
    height: int
    placements: tuple[tuple[int, Placement], ...]
    """How it is placed for each of its latents, with the number of the size."""
    mask: bytes | None = None
    mask_sha256: str = ""
    control: bytes | None = None

    @property
    def size(self) -> Size:
        """Return width and height in pixels."""
        return self.width, self.height


def read_picture(picture: TrainingPicture, data: DataConfig, seed: int) -> ReadPicture:
    """Return the files of ``picture`` and its placements; one of FAULTS if it cannot be trained."""
    content = read_bytes(picture.path)
    width, height = picture_size(content)
    path = picture.control_path
    control = None if path is None else read_bytes(path)
    sha256 = hashlib.sha256(content + (control or b"")).hexdigest()
    path = picture.mask_path
    mask = None if path is None else read_bytes(path)
    found = placements_of(picture, data, seed, width, height, sha256)
    for _, placement in found:
        require_enough_pixels(width, height, placement)
    mask_sha256 = "" if mask is None else hashlib.sha256(mask).hexdigest()
    return ReadPicture(content, sha256, width, height, found, mask, mask_sha256, control)


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


REPEATS = NUM_TIMESTEPS
"""Samples of a picture in the evaluation: one at each timestep."""


def held_out(sha256s: Iterable[str], part: float, seed: int) -> frozenset[str]:
    """Return those of the pictures with ``sha256s`` that are held out: ``part`` of them, at least one.

    Equal pictures stay together. The choice depends on ``seed`` and on the pictures' bytes only. Raises
    ConfigError if no picture would be left.
    """
    distinct = set(sha256s)
    if not part:
        return frozenset()
    if len(distinct) < 2:
        text = f"needs two different pictures, of which one is trained; there is {len(distinct)}"
        raise ConfigError("spec.run.data.validation_split", part, text)
    order = sorted(distinct, key=lambda each: hashlib.sha256(f"{seed} {each}".encode()).digest())
    return frozenset(order[: max(1, round(part * len(order)))])
