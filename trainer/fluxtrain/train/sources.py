"""The data sets of a run, which one rank opens for all.

To open a set, its files are scanned: headers, offsets, keys. With 512 ranks and a thousand files each rank
would open every file, half a million times in all, from one storage. So rank 0 scans them, and gives the
result to the others, which open a file when they read its first sample.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Protocol

import numpy as np

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.closed_division import require_whole_sets
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.dataset import Source
from fluxtrain.data.loader import training_order
from fluxtrain.data.sources import PARTS, Pictures, Sources, open_sources
from fluxtrain.encode.clip import add_token_ids
from fluxtrain.errors import ConfigError, DataError
from fluxtrain.parallel.distributed import StopRequest, World
from fluxtrain.runtime.progress import Alive, counted

CACHE_PICTURES = "fluxtrain.picture_cache.stage:cache_pictures"
CHECK_PICTURES = "fluxtrain.picture_cache.stage:check_pictures"
"""Encodes the pictures of a run before it begins, and raises what is wrong with them; only then imported."""


class CachedPictures(Protocol):
    """The pictures of a run, all of which are encoded."""

    def open(self, config: RunConfig, output: Path) -> Pictures:
        """Return data sets and encodings of the empty prompt; ``output`` gets a report of what is used."""


def shared_sources(
    config: RunConfig, paths: RunPaths, world: World, pictures: CachedPictures | None = None
) -> Sources:
    """Return the data of the run; every rank must call this. ``pictures`` are those of ``data.images``.

    Raises on every rank the DataError or ConfigError of `open_sources`, which rank 0 calls, and ConfigError
    if the closed division needs other sets; and DataError on a node that lacks a file that rank 0 has seen.
    Synthetic data has no files: each rank makes it.
    """
    if config.data.source == "synthetic":
        return open_sources(config, paths.data)
    sources = world.from_main(lambda: _scan(config, paths, pictures))
    if world.local_rank == 0 and not world.is_main:
        _require_same_files(sources)
    return sources


def run_sources(
    config: RunConfig,
    paths: RunPaths,
    world: World,
    stop: StopRequest,
    alive: Alive,
    is_new: bool,
) -> Sources:
    """Return the data of the run, whose pictures are encoded first; every rank must call this.

    A run that is not ``is_new`` has the pictures that it began with. Raises as `shared_sources` and
    the cache of pictures.
    """
    if config.data.images is None:
        return shared_sources(config, paths, world)
    pictures = resolve_name(CACHE_PICTURES)(config, paths, world, stop, alive, is_new)
    return shared_sources(config, paths, world, pictures)


def with_steps(config: RunConfig, sources: Sources, world: World) -> RunConfig:
    """Return ``config`` with the steps that ``schedule.epochs`` of ``sources`` are; rank 0 prints them."""
    schedule = config.schedule
    if schedule.epochs is None:
        return config
    steps = training_order(config, sources.train).batches(schedule.epochs)
    samples, are = counted(len(sources.train), "sample"), "is" if schedule.epochs == 1 else "are"
    text = f"{counted(schedule.epochs, 'epoch')} of {samples} {are} {counted(steps, 'step')}"
    if world.is_main:
        print(f"fluxtrain: {text}", file=sys.stderr, flush=True)
    schedule = schedule.model_copy(update={"steps": steps})
    return config.model_copy(update={"schedule": schedule})


def _scan(config: RunConfig, paths: RunPaths, pictures: CachedPictures | None) -> Sources:
    """Return the opened data, with the timesteps of a validation set that is going to be used."""
    opened = None if pictures is None else pictures.open(config, paths.output)
    sources = open_sources(config, paths.data, opened)
    add_token_ids(sources, config, paths.models)
    require_whole_sets(config, *sources.lengths)
    sources = replace(sources, digests=index_digests(sources))
    require_digests(config, sources.digests)
    if config.evaluation.is_on and sources.validation is not None:
        sources.validation.read_timesteps()
    return sources


def _require_same_files(sources: Sources) -> None:
    """Raise DataError if a file is missing in the folders of this node: one listing of each folder."""
    folders = defaultdict[Path, list[Path]](list)
    for source in (sources.train, sources.validation):
        for path in source.files if source is not None else ():
            folders[path.parent].append(path)
    for folder, paths in folders.items():
        try:
            names = set(os.listdir(folder))
        except OSError as error:
            raise DataError(f"{folder}: {error.strerror}, but rank 0 has it") from None
        missing = sorted(path.name for path in paths if path.name not in names)
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise DataError(f"{folder / missing[0]}{more}: missing on this node, but rank 0 has it")


# The digest of a data set's index: names, sizes and order of its files, and the samples in each.
#
# It tells whether two runs read the same set in the same order. It covers no contents: those of own
# shards have checksums (``data.verify_checksums``), those of MLCommons' files are verified when
# they are downloaded.


def index_digests(sources: Sources) -> dict[str, str]:
    """Return the SHA-256 digest of the index of the training and of the validation set, in hexadecimal."""
    found = {part: getattr(sources, part) for part in PARTS}
    return {part: index_digest(source) for part, source in found.items() if source is not None}


def index_digest(source: Source) -> str:
    """Return the SHA-256 digest of the index of ``source``; DataError if a file is gone."""
    files = [[path.name, _size(path)] for path in source.files]
    digest = hashlib.sha256(json.dumps([len(source), files]).encode())
    if source.starts is not None:
        digest.update(np.asarray(source.starts, dtype="<i8").tobytes())
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
