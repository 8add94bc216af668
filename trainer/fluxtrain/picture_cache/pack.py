"""Writes pictures and their captions as WebDataset shards, with the webdataset library's own writer."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fluxtrain.data.pictures.picture import PictureError, read_bytes
from fluxtrain.data.pictures.reading import reason_of
from fluxtrain.data.pictures.subset import TrainingPicture
from fluxtrain.data.tar.index import MAX_CAPTION_BYTES
from fluxtrain.errors import UNSET, ConfigError, DataError, StorageError

PATTERN = "pictures-%06d.tar"
MAX_SHARD_BYTES = 1 << 30
"""After that many bytes a shard ends too."""
_FIELD = "spec.run.data.images"


def require_packable(pictures: Sequence[TrainingPicture], given: str) -> None:
    """Raise ConfigError if ``pictures`` have what shards of pictures and captions cannot say."""
    if any(picture.mask_path is not None for picture in pictures):
        raise ConfigError("spec.run.data.masks", UNSET, "masks are not packed; leave them out")
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
) -> int:
    """Write ``pictures`` with their captions in their order to the folder ``output``; return its shards.

    The folder appears whole or not at all; equal pictures give equal bytes. Raises StorageError if it exists
    or cannot be written, DataError if a picture cannot be read.
    """
    if output.exists():
        raise StorageError(f"{output}: exists already; name a folder to make")
    partial = output.with_name(f"{output.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write(pictures, partial, shard_size, advance)
        count = len(list(partial.iterdir()))
        partial.rename(output)
    except OSError as error:
        raise StorageError(f"{output}: cannot be written ({error.strerror})") from None
    return count


def _write(
    pictures: Sequence[TrainingPicture],
    folder: Path,
    shard_size: int,
    advance: Callable[[], object],
) -> None:
    from webdataset import ShardWriter  # takes a while to import

    with ShardWriter(
        str(folder / PATTERN),
        maxcount=shard_size,
        maxsize=MAX_SHARD_BYTES,
        verbose=0,
        encoder=False,
        mtime=0,
    ) as writer:
        for number, picture in enumerate(pictures):
            writer.write(_sample(number, picture))
            advance()


def _sample(number: int, picture: TrainingPicture) -> dict[str, Any]:
    try:
        content = read_bytes(picture.path)
    except (OSError, PictureError) as error:
        raise DataError(f"{picture.label}: {reason_of(error)}") from None
    suffix, caption = picture.path.suffix.lower()[1:], picture.caption.encode("utf-8", "replace")
    if len(caption) > MAX_CAPTION_BYTES:
        text = f"its caption has {len(caption)} bytes, at most {MAX_CAPTION_BYTES} are packed"
        raise DataError(f"{picture.label}: {text}")
    text_of = {"txt": caption} if caption else {}
    return {"__key__": f"{number:08d}", suffix: content, **text_of}
