"""The digest of a data set's index: names, sizes and order of its files, and the samples in each.

It tells whether two runs read the same set in the same order. It covers no contents: those of own shards have
checksums (``data.verify_checksums``), those of MLCommons' files are verified when they are downloaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.images.dataset import ImageDataset
from fluxtrain.data.sources import PARTS, Source, Sources
from fluxtrain.errors import ConfigError, DataError


def index_digests(sources: Sources) -> dict[str, str]:
    """Return the SHA-256 digest of the index of the training and of the validation set, in hexadecimal."""
    found = {part: getattr(sources, part) for part in PARTS}
    return {part: index_digest(source) for part, source in found.items() if source is not None}


def index_digest(source: Source) -> str:
    """Return the SHA-256 digest of the index of ``source``; DataError if a file is gone."""
    files = [[path.name, _size(path)] for path in source.files]
    digest = hashlib.sha256(json.dumps([len(source), files]).encode())
    held = source.source if isinstance(source, ImageDataset) else source
    starts = getattr(held, "starts", None)  # synthetic data has no files
    if starts is not None:
        digest.update(np.asarray(starts, dtype="<i8").tobytes())
    return digest.hexdigest()


def require_digests(config: RunConfig, digests: Mapping[str, str]) -> None:
    """Raise ConfigError if ``config`` states another digest for a set."""
    for part, found in digests.items():
        given = getattr(config.data, f"{part}_digest")
        if given not in (None, found):
            raise ConfigError(
                f"spec.run.data.{part}_digest", given, f"the index in {part} is {found}"
            )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
