"""What a run would make of its pictures: all that its first minutes would find, and nothing is encoded."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.data import PIXELS_PER_LATENT, Size
from fluxtrain.data.loader import order_of
from fluxtrain.data.pictures.inspection import Inspection, inspect
from fluxtrain.data.pictures.picture import variant_captions
from fluxtrain.data.pictures.subset import (
    TrainingPicture,
    find_pictures,
    held_out,
)
from fluxtrain.errors import DataError
from fluxtrain.picture_cache.fetching import local_pictures
from fluxtrain.picture_cache.work import refused

_BYTES = {"bfloat16": 2, "float32": 4}
Advance = Callable[[], object]


@dataclass(frozen=True)
class PictureCheck:
    """The pictures of a run, looked at as its training would."""

    inspection: Inspection
    samples: Counter[Size]
    """Samples of an epoch by width and height in pixels."""
    steps_per_epoch: float
    steps: int
    """Of the whole run."""
    latents: int
    """Files of latents that are encoded, with mirrored and other crops."""
    captions: int
    """Captions that are encoded, with their variants and the empty one."""
    cache_bytes: int
    held_out: int = 0

    def refusal(self, config: RunConfig) -> DataError | None:
        """Return the error that the run would end with before it begins; None if it begins."""
        used = (look.picture for look in self.inspection.used)
        return refused(config.data, used, self.inspection.skipped)


@contextmanager
def run_pictures(
    config: RunConfig, paths: RunPaths, is_shown: bool = False
) -> Iterator[tuple[list[TrainingPicture], dict[str, str], dict[str, str]]]:
    """Yield the run's pictures, fetched to this node, and what is skipped and left out, with the reason.

    Raises what a run raises before it begins.
    """
    with local_pictures(config.data, paths, lambda: None, is_shown) as places:
        yield find_pictures(config, paths.data, places)


def check_run(
    config: RunConfig,
    pictures: list[TrainingPicture],
    skipped: dict[str, str],
    left_out: dict[str, str],
    advance: Advance = lambda: None,
    decodes: bool = True,
) -> PictureCheck:
    """Return what the run of ``config`` makes of ``pictures``, all of which it ``decodes``, or only reads.

    Files that are ``skipped`` or ``left_out`` are not looked at.
    """
    threads = len(os.sched_getaffinity(0))
    seed = config.drawn_seed
    return _counted(
        config, inspect(pictures, skipped, config.data, seed, threads, advance, decodes, left_out)
    )


def recounted(
    config: RunConfig, pictures: list[TrainingPicture], known: Inspection
) -> PictureCheck:
    """Return what the run of ``config`` makes of ``pictures``, ``known`` in its sizes; none is read."""
    looks = {look.name: look for look in known.looks}
    found = [replace(looks[each.label], picture=each) for each in pictures if each.label in looks]
    return _counted(config, replace(known, looks=found))


def _counted(config: RunConfig, found: Inspection) -> PictureCheck:
    hashes = [look.sha256 for look in found.used if not look.picture.is_reg]
    chosen = held_out(hashes, config.data.validation_split, config.drawn_seed)
    samples = found.samples(chosen)
    encoded = {(look.sha256, placement) for look in found.used for _, placement in look.placements}
    latents = Counter(placement.size for _, placement in encoded)
    pictures = (look.picture for look in found.looks)
    captions = {""}.union(
        *(variant_captions(each.caption, each.variants, config.drawn_seed) for each in pictures)
    )
    return PictureCheck(
        found,
        samples,
        *_steps(config, samples),
        sum(latents.values()),
        len(captions),
        cache_bytes(config, latents, len(captions)),
        sum(each in chosen for each in hashes),
    )


def cache_bytes(config: RunConfig, latents: Counter[Size], captions: int) -> int:
    """Return the bytes of the encodings of ``latents``, by width and height in pixels, and of captions."""
    itemsize = _BYTES[config.encoders.precision]
    pixels = sum(count * width * height for (width, height), count in latents.items())
    image = 2 * config.latent_shape[0] * pixels // PIXELS_PER_LATENT**2
    text = config.data.text_length * config.model.context_in_dim + config.model.vec_in_dim
    return itemsize * (image + captions * text)


def _steps(config: RunConfig, samples: Counter[Size]) -> tuple[float, int]:
    """Return the steps of an epoch and of the run; 0 without samples."""
    schedule, count = config.schedule, sum(samples.values())
    if not count:
        return 0, 0
    sizes = [(h // PIXELS_PER_LATENT, w // PIXELS_PER_LATENT) for w, h in samples]
    order = order_of(config, count, np.repeat(np.array(sizes), list(samples.values()), axis=0))
    is_square = config.data.buckets is None
    per_epoch = count / schedule.global_batch_size if is_square else order.batches(1)
    return per_epoch, order.batches(schedule.epochs) if schedule.epochs else schedule.steps
