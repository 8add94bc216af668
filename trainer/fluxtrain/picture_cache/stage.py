"""Encodes this rank's share of the pictures and captions that a cache lacks, and waits for the others."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from fluxtrain.contract.launch import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.data import ALPHA
from fluxtrain.data.buckets import Placement
from fluxtrain.data.pictures.cache import Latents, Record, write_encodings
from fluxtrain.data.pictures.masks import mask_of
from fluxtrain.data.pictures.picture import decode, fit
from fluxtrain.data.pictures.reading import FAULTS, read_picture, reason_of
from fluxtrain.data.pictures.subset import TrainingPicture
from fluxtrain.distributed import StopRequest, World
from fluxtrain.encode.codec import Codec, load_codec
from fluxtrain.encode.text import load_text_encoder
from fluxtrain.errors import ConfigError, StoppedError, one_line
from fluxtrain.picture_cache.console import CachingConsole
from fluxtrain.picture_cache.fetching import fetched_pictures
from fluxtrain.picture_cache.resumed import encoded_work
from fluxtrain.picture_cache.work import CachedPictures, find_work, wanted_latents
from fluxtrain.progress import Alive

_POLL_SECONDS = 0.2
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class _Decoded:
    """A picture that is read: at each size its pixels and its mask; or a fault."""

    picture: TrainingPicture
    record: Record
    crops: tuple[tuple[Latents, UInt8[Tensor, "3 H W"]], ...] = ()
    masks: tuple[tuple[str, Float[Tensor, "h w"]], ...] = ()
    """By ID."""


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
    with fetched_pictures(config.data, paths, world, stop, alive) as places:
        work = world.from_main(lambda: find_work(config, paths, is_new, places))
        with CachingConsole(world.is_main, work) as console:
            stage = _Stage(config, paths, world, stop, alive, work, console)
            stage.encode_pictures(work.missing_pictures[world.rank :: world.size])
            stage.encode_texts(work.missing_texts[world.rank :: world.size])
            stage.wait_for_others()
    return work


@dataclass(frozen=True)
class _Stage:
    config: RunConfig
    paths: RunPaths
    world: World
    stop: StopRequest
    alive: Alive
    work: CachedPictures
    console: CachingConsole

    def encode_pictures(self, pictures: Sequence[TrainingPicture]) -> None:
        """Encode ``pictures``, which threads read ahead."""
        if not pictures:
            return
        codec: Codec | None = None  # not needed for pictures that were only touched
        for decoded in _ahead(self._read, pictures, max(1, self.config.data.num_workers)):
            self._check_stop()
            for latents, pixels in decoded.crops:
                codec = codec or self._load_codec()
                self._encode_picture(codec, latents, pixels)
            for mask_id, mask in decoded.masks:
                write_encodings(self.work.cache.mask_path(mask_id), {"mask": mask})
            self.work.cache.write_record(decoded.picture, decoded.record)
            self._report(decoded.record)
        del codec
        self._free()

    def encode_texts(self, captions: Sequence[str]) -> None:
        """Encode ``captions``."""
        if not captions:
            return
        config, length = self.config, self.config.data.text_length
        encoder = load_text_encoder(
            config.encoders, length, self.paths.models, self.world.device, self._dtype
        )
        self.alive()
        for caption in captions:
            self._check_stop()
            txt, vec = encoder.encode([caption])
            self._require("context_in_dim", config.model.context_in_dim, txt.shape[2])
            self._require("vec_in_dim", config.model.vec_in_dim, vec.shape[1])
            write_encodings(self.work.cache.text_path(caption), {"txt": txt[0], "vec": vec[0]})
            self._report()
        del encoder
        self._free()

    def wait_for_others(self) -> None:
        """Poll until all is encoded; unlike a collective this has no timeout."""
        count = self._count()
        while count < self.console.total:
            self._check_stop()
            time.sleep(_POLL_SECONDS)
            before, count = count, self._count()
            if count > before:
                self._report(count=count)

    def _load_codec(self) -> Codec:
        encoders, dtype = self.config.encoders, self._dtype
        return load_codec(encoders, self.paths.models).to(self.world.device, dtype)

    @torch.no_grad()
    def _encode_picture(
        self, codec: Codec, latents: Latents, pixels: UInt8[Tensor, "3 H W"]
    ) -> None:
        scaled = pixels[None].to(self.world.device).float() / 127.5 - 1
        mean, logvar = codec.encode(scaled.to(self._dtype))
        self._require("in_channels", self.config.model.in_channels, mean.shape[1] * 4)
        path = self.work.cache.latents_path(latents.id)
        write_encodings(path, {"mean": mean[0], "logvar": logvar[0]})

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.config.encoders.precision)
        return dtype

    def _read(self, picture: TrainingPicture) -> _Decoded:
        """Return ``picture`` decoded at the sizes that are not in the cache."""
        name, cache = picture.label, self.work.cache
        try:
            read = read_picture(picture, self.config.data, self.config.drawn_seed)
            seen = read.width, read.height, read.sha256, read.mask_sha256
            wanted = wanted_latents(self.config, cache, picture, *seen)
            latents = [each for each, _ in wanted]
            missing = [pair for pair in wanted if not cache.latents_path(pair[0].id).exists()]
            crops = tuple((each, _pixels(read.content, placement)) for each, placement in missing)
            kind = ALPHA if picture.has_alpha_mask else ""
            masks = tuple(
                (each.mask, mask_of(read.mask, kind, seen[:2], placement))
                for each, placement in wanted
                if read.mask is not None and not cache.mask_path(each.mask).exists()
            )
        except FAULTS as error:
            return _Decoded(picture, Record(name, fault=reason_of(error)))
        width, height, sha256, mask_sha256 = seen
        record = Record(name, sha256, width, height, tuple(latents), mask_sha256=mask_sha256)
        return _Decoded(picture, record, crops, masks)

    def _require(self, field: str, expected: int, actual: int) -> None:
        if expected != actual:
            text = f"the encoders give {actual}"
            raise ConfigError(f"spec.run.model.{field}", expected, text)

    def _check_stop(self) -> None:
        if self.stop.requested:
            raise StoppedError("stopped; what is encoded is kept, the same command resumes")

    def _report(self, record: Record | None = None, count: int | None = None) -> None:
        self.alive()
        if record is not None and record.fault:
            text = one_line(f"skipped {record.name}: {record.fault}")
            print(text, file=sys.stderr, flush=True)
        if self.console.is_due:
            self.console.advance(self._count() if count is None else count)

    def _count(self) -> int:
        """Return how much of the work is done, by any rank."""
        return count_done(self.work)

    def _free(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()


def count_done(work: CachedPictures) -> int:
    """Return how many of the missing pictures and captions of ``work`` are in the cache by now."""
    existing, cache = work.cache.existing(), work.cache
    names = [f"pictures/{cache.record_path(picture).name}" for picture in work.missing_pictures]
    names += [f"texts/{cache.text_path(caption).name}" for caption in work.missing_texts]
    return sum(name in existing for name in names)


def _pixels(content: bytes, placement: Placement) -> UInt8[Tensor, "3 H W"]:
    return fit(decode(content, at_least=placement.resized), placement)


def _ahead(
    function: Callable[[Item], Result], items: Sequence[Item], threads: int
) -> Iterator[Result]:
    """Yield the results for ``items`` in order, computed by ``threads``, at most two each ahead."""
    remaining = iter(items)
    with ThreadPoolExecutor(threads, thread_name_prefix="picture") as pool:
        pending = list[Future[Result]]()
        try:
            pending += [pool.submit(function, item) for item in islice(remaining, 2 * threads)]
            while pending:
                result = pending.pop(0).result()
                pending += [pool.submit(function, item) for item in islice(remaining, 1)]
                yield result
        finally:
            for future in pending:
                future.cancel()
