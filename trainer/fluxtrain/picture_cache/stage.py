"""Encodes this rank's share of the pictures and captions that a cache lacks, and waits for the others."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from fluxtrain.contract.process import CHECKPOINTS_FOLDER, RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.pictures.dataset import read_training_set, write_encodings
from fluxtrain.data.pictures.subset import Places, TrainingPicture, find_pictures, remote_sources
from fluxtrain.encode.encoders import check_files
from fluxtrain.encode.text import load_text_encoder
from fluxtrain.errors import StoppedError
from fluxtrain.parallel.distributed import StopRequest, World
from fluxtrain.picture_cache.encoder import (
    PictureEncoder,
    encoders_dtype,
    free_memory,
    require_equal,
)
from fluxtrain.picture_cache.fetching import (
    Fetched,
    fetched_pictures,
    is_configured_alike,
    pinned_sources,
)
from fluxtrain.picture_cache.streaming import Streaming
from fluxtrain.picture_cache.work import CachedPictures, encoding_bar, find_work, open_cache
from fluxtrain.runtime.progress import Alive
from fluxtrain.runtime.progress_bar import ProgressBar
from fluxtrain.state.run_state import latest

_POLL_SECONDS = 0.2


def cache_pictures(
    config: RunConfig,
    paths: RunPaths,
    world: World,
    stop: StopRequest,
    alive: Alive,
    is_new: bool = True,
) -> CachedPictures:
    """Encode all of the run's pictures and captions that are not in its cache; every rank must call this.

    Encoders are loaded only on ranks that have something to encode, one after the other, and freed. A run
    that is not ``is_new`` has the pictures that it began with.
    Raises DataError if there are no pictures, ConfigError if the encodings do not fit the model, StoppedError
    after a stop request: what is encoded is kept.
    """
    complete = world.from_main(lambda: encoded_work(config, paths, is_new))
    if complete is not None:
        if world.is_main:
            text = f"all pictures are encoded in {complete.cache.folder}; their source is not read again"
            print(f"fluxtrain: {text}", file=sys.stderr, flush=True)
        return complete

    def check() -> None:
        alive()
        if stop.requested:
            raise StoppedError("stopped; what is fetched is kept, the same command resumes")

    with fetched_pictures(config.data, paths, world, check) as fetched:
        places = _streamed(config, paths, world, fetched, check) if fetched else {}
        work = world.from_main(lambda: find_work(config, paths, is_new, places))
        with encoding_bar(world.is_main, work) as console:
            stage = _Stage(config, paths, world, stop, alive, work, console)
            stage.encode_pictures(work.missing_pictures[world.rank :: world.size])
            stage.encode_texts(work.missing_texts[world.rank :: world.size])
            stage.wait_for_others()
    return work


def _streamed(
    config: RunConfig, paths: RunPaths, world: World, fetched: Fetched, check: Alive
) -> Places:
    """Return what is at each URL, after all ranks have encoded what is streamed; complete on rank 0."""
    if not fetched.streamed:
        return fetched.places
    cache = open_cache(config, paths)
    streaming = Streaming(config, paths, cache, fetched, check, world)
    streaming.list_folders()
    fetched.channel.wait_for_all(check)
    streaming.encode(world.from_main(streaming.missing))
    fetched.channel.wait_for_all(check)
    return streaming.places() if world.is_main else {}


@dataclass(frozen=True)
class _Stage:
    config: RunConfig
    paths: RunPaths
    world: World
    stop: StopRequest
    alive: Alive
    work: CachedPictures
    console: ProgressBar

    def encode_pictures(self, pictures: Sequence[TrainingPicture]) -> None:
        encoder = PictureEncoder(self.config, self.paths, self.world, self.work.cache)
        encoder.encode(pictures, self._check_stop, lambda _: self._report())
        encoder.free()

    def encode_texts(self, captions: Sequence[str]) -> None:
        if not captions:
            return
        config, place = self.config, (self.paths.models, self.world.device)
        length, dtype = config.data.text_length, encoders_dtype(config)
        encoder = load_text_encoder(config.encoders, length, *place, dtype)
        self.alive()
        for caption in captions:
            self._check_stop()
            txt, vec = encoder.encode([caption])
            require_equal("context_in_dim", config.model.context_in_dim, txt.shape[2])
            require_equal("vec_in_dim", config.model.vec_in_dim, vec.shape[1])
            write_encodings(self.work.cache.text_path(caption), {"txt": txt[0], "vec": vec[0]})
            self._report()
        del encoder
        free_memory(self.world)

    def wait_for_others(self) -> None:
        """Poll until all is encoded; unlike a collective this has no timeout."""
        count = self._count()
        while count < self.console.total:
            self._check_stop()
            time.sleep(_POLL_SECONDS)
            before, count = count, self._count()
            if count > before:
                self._report(count=count)

    def _check_stop(self) -> None:
        if self.stop.requested:
            raise StoppedError("stopped; what is encoded is kept, the same command resumes")

    def _report(self, count: int | None = None) -> None:
        self.alive()
        if self.console.is_due:
            self.console.advance((self._count() if count is None else count) - self.console.done)

    def _count(self) -> int:
        existing, cache = self.work.cache.existing(), self.work.cache
        paths = [cache.record_path(picture) for picture in self.work.missing_pictures]
        paths += [cache.text_path(caption) for caption in self.work.missing_texts]
        return sum(str(path) in existing for path in paths)


def encoded_work(config: RunConfig, paths: RunPaths, is_new: bool) -> CachedPictures | None:
    """Return the samples of a run that is not ``is_new``, if all of them are in its cache; else None.

    None too if its pictures are files of a folder, which cost little to list, or its ``data`` or data set
    config name other sources, repeats or captions than those that it began with.
    """
    if is_new or not remote_sources(config.data, paths.data):
        return None
    stored = read_training_set(paths.output)
    if stored is None or not is_configured_alike(config.data, paths):
        return None
    check_files(config.encoders, paths.models)
    cache = open_cache(config, paths)
    wanted = {str(cache.text_path(""))}
    for sample in stored.every:
        wanted |= cache.files_of(sample.latents, sample.masks)
        wanted |= {str(cache.text_path(each)) for each in sample.captions}
    if not cache.existing().issuperset(wanted):
        return None
    return CachedPictures(cache, [], {}, [], [], stored)


def is_encoded(config: RunConfig, paths: RunPaths) -> bool:
    """Return whether the run in the output goes on from a checkpoint, and `encoded_work` finds all."""
    is_new = latest(paths.output / CHECKPOINTS_FOLDER) is None
    return not is_new and encoded_work(config, paths, is_new) is not None


def check_pictures(config: RunConfig, paths: RunPaths) -> None:
    """Raise an error if the run's pictures or encoders are missing; nothing is fetched or decoded."""
    if not is_encoded(config, paths):
        find_pictures(config, paths.data)
        pinned_sources(config.data, paths)
    check_files(config.encoders, paths.models)
