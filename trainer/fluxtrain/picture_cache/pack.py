"""Writes pictures and their captions as WebDataset shards, with the webdataset library's own writer."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fluxtrain.data.formats.tar_index import MAX_CAPTION_BYTES
from fluxtrain.data.pictures.picture import decode, read_bytes
from fluxtrain.data.pictures.subset import FAULTS, TrainingPicture, reason_of
from fluxtrain.errors import UNSET, ConfigError, DataError, StorageError
from fluxtrain.picture_cache.work import no_usable_images
from fluxtrain.runtime.files import writing

PATTERN = "pictures-%06d.tar"
MAX_SHARD_BYTES = 1 << 30
"""After that many bytes a shard ends too."""
_FIELD = "spec.run.data.images"


@dataclass(frozen=True)
class Packed:
    """What was written."""

    pictures: int
    shards: int
    left_out: dict[str, str]
    """Pictures that no training can use, with the reason."""


def require_packable(pictures: Sequence[TrainingPicture], given: str) -> None:
    """Raise ConfigError if ``pictures`` have what shards of pictures and captions cannot say."""
    if any(picture.mask_path is not None for picture in pictures):
        raise ConfigError("spec.run.data.masks", UNSET, "masks are not packed; leave them out")
    if any(picture.control is not None for picture in pictures):
        raise ConfigError(
            "spec.run.data.controls", UNSET, "controls are not packed; leave them out"
        )
    if len({picture.repeats for picture in pictures}) > 1:
        text = "its folders have different repeats, which shards do not have; pack each folder"
        raise ConfigError(_FIELD, given, text)
    if len({picture.weight for picture in pictures}) > 1:
        raise ConfigError(_FIELD, given, "has regularisation images; pack each folder")


def pack(
    pictures: Sequence[TrainingPicture],
    output: Path,
    shard_size: int,
    advance: Callable[[], object] = lambda: None,
) -> Packed:
    """Write ``pictures`` with their captions in their order to the folder ``output``.

    Those that cannot be decoded are left out. The folder appears whole or not at all; equal pictures give
    equal bytes. Raises StorageError if it exists or cannot be written, DataError if no picture is left.
    """
    if output.exists():
        raise StorageError(f"{output}: exists already; name a folder to make")
    partial = output.with_name(f"{output.name}.partial")
    with writing(output):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        left_out = _write(pictures, partial, shard_size, advance)
        count = len(list(partial.iterdir()))
        if len(left_out) == len(pictures):
            shutil.rmtree(partial)
            raise no_usable_images(left_out)
        partial.rename(output)
    return Packed(len(pictures) - len(left_out), count, left_out)


def _write(
    pictures: Sequence[TrainingPicture],
    folder: Path,
    shard_size: int,
    advance: Callable[[], object],
) -> dict[str, str]:
    """Write what can be decoded; return the names of the others with the reason."""
    from webdataset import ShardWriter  # takes a while to import

    left_out = dict[str, str]()
    number = 0
    with ShardWriter(
        str(folder / PATTERN),
        maxcount=shard_size,
        maxsize=MAX_SHARD_BYTES,
        verbose=0,
        encoder=False,
        mtime=0,
    ) as writer:
        for picture, fault in _checked(pictures):
            if fault:
                left_out[picture.label] = fault
            else:
                writer.write(_sample(number, picture))
                number += 1
            advance()
    return left_out


def _checked(pictures: Sequence[TrainingPicture]) -> Iterator[tuple[TrainingPicture, str]]:
    threads = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(threads, thread_name_prefix="picture") as pool:
        yield from zip(pictures, pool.map(_fault, pictures), strict=True)


def _fault(picture: TrainingPicture) -> str:
    try:
        decode(read_bytes(picture.path), at_least=(1, 1))
    except FAULTS as error:
        return reason_of(error)
    size = len(_caption(picture))
    if size > MAX_CAPTION_BYTES:
        return f"its caption has {size} bytes, at most {MAX_CAPTION_BYTES} are packed"
    return ""


def _sample(number: int, picture: TrainingPicture) -> dict[str, Any]:
    try:
        content = read_bytes(picture.path)
    except FAULTS as error:
        raise DataError(f"{picture.label}: {reason_of(error)}") from None
    caption, suffix = _caption(picture), picture.path.suffix.lower()[1:]
    return {"__key__": f"{number:08d}", suffix: content, **({"txt": caption} if caption else {})}


def _caption(picture: TrainingPicture) -> bytes:
    return picture.caption.encode("utf-8", "replace")
