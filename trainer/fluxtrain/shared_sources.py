"""The data sets of a run, which one rank opens for all.

To open a set, its files are scanned: headers, offsets, keys. With 512 ranks and a thousand files each rank
would open every file, half a million times in all, from one storage. So rank 0 scans them, and gives the
result to the others, which open a file when they read its first sample.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from fluxtrain.contract.launch import RunPaths
from fluxtrain.contract.run.closed_division import require_whole_sets
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.file_dataset import FileDataset
from fluxtrain.data.index_digest import index_digests, require_digests
from fluxtrain.data.loader import training_order
from fluxtrain.data.sources import Sources, open_sources
from fluxtrain.distributed import StopRequest, World
from fluxtrain.encode.clip import add_token_ids
from fluxtrain.errors import DataError
from fluxtrain.picture_cache import CachedPictures, cache_pictures
from fluxtrain.progress import Alive


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
    `cache_pictures`.
    """
    if config.data.images is None:
        return shared_sources(config, paths, world)
    pictures = cache_pictures(config, paths, world, stop, alive, is_new)
    return shared_sources(config, paths, world, pictures)


def with_steps(config: RunConfig, sources: Sources, world: World) -> RunConfig:
    """Return ``config`` with the steps that ``schedule.epochs`` of ``sources`` are; rank 0 prints them."""
    schedule = config.schedule
    if schedule.epochs is None:
        return config
    steps = training_order(config, sources.train).batches(schedule.epochs)
    text = f"{schedule.epochs} epochs of {len(sources.train):,} samples are {steps:,} steps"
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
    if config.evaluation.is_on and isinstance(sources.validation, FileDataset):
        _ = sources.validation.stored_timesteps  # kept by the data set
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
