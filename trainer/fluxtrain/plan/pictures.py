"""What a run encodes of its pictures before training: counted where they are files of this machine."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.data import AS_THEY_ARE, PIXELS_PER_LATENT
from fluxtrain.data.pictures.subset import find_pictures, remote_sources
from fluxtrain.errors import FluxtrainError
from fluxtrain.picture_cache.check import PictureCheck, cache_bytes, check_run
from fluxtrain.runtime.progress import binary
from fluxtrain.state.random_seed import with_any_seed

MAX_BYTES = 8 << 30
"""Pictures with more bytes are not read for a plan."""
_TELLS = "fluxtrain data check -f counts them"


class CountedPictures(BaseModel):
    """The pictures of a run, none of which was decoded."""

    model_config = ConfigDict(frozen=True)

    pictures: int
    """Pictures that are used, if all can be decoded."""
    left_out: int
    """Files that are not used."""
    held_out: int
    """Pictures of the evaluation."""
    samples: int
    """Samples of an epoch."""
    steps_per_epoch: float
    """Optimizer steps of an epoch."""
    latents: int
    """Latents to encode, with mirrored and other crops, each once."""
    captions: int
    """Captions to encode, with their variants and the empty one, each once."""
    cache_bytes: int
    """Bytes of these encodings."""


class PicturesPlan(BaseModel):
    """What is encoded before training."""

    model_config = ConfigDict(frozen=True)

    latents_per_picture: int
    """Most latents of a picture: sizes, crops, mirrored or not."""
    captions_per_picture: int
    """Most captions of a picture."""
    bytes_per_picture: int
    """Most bytes of these in the cache."""
    counted: CountedPictures | None
    """None if the pictures are not counted."""
    steps: int | None
    """Steps of the run; None if epochs of pictures that are not counted give it."""
    unknown: str | None
    """Why they are not counted."""


def plan_pictures(config: RunConfig, data_root: Path) -> PicturesPlan | None:
    """Return what ``config`` encodes of its pictures below ``data_root``; None if it has none.

    Nothing is fetched, unpacked or decoded; an error in the pictures is why they are not counted.
    """
    if config.data.images is None:
        return None
    config = with_any_seed(config)
    steps = None if config.schedule.epochs is not None else config.schedule.steps
    made = partial(PicturesPlan, **_per_picture(config))
    try:
        check = _counted(config, data_root)
    except FluxtrainError as error:
        return made(counted=None, steps=steps, unknown=str(error).partition(":\n")[0])
    if isinstance(check, str):
        return made(counted=None, steps=steps, unknown=check)
    counted = CountedPictures(
        pictures=len(check.inspection.used),
        left_out=len(check.inspection.skipped),
        held_out=check.held_out,
        samples=sum(check.samples.values()),
        steps_per_epoch=check.steps_per_epoch,
        latents=check.latents,
        captions=check.captions,
        cache_bytes=check.cache_bytes,
    )
    return made(counted=counted, steps=check.steps, unknown=None)


def _per_picture(config: RunConfig) -> dict[str, int]:
    """Return the most that is encoded of a picture."""
    variants = config.data.variants or AS_THEY_ARE
    height, width = (side * PIXELS_PER_LATENT for side in config.data.largest_latent)
    latents = len(config.data.resolutions) * variants.crops * (1 + variants.flip)
    captions = variants.captions if variants.shuffle_caption or variants.tag_dropout else 1
    size = cache_bytes(config, Counter({(width, height): latents}), captions)
    return {
        "latents_per_picture": latents,
        "captions_per_picture": captions,
        "bytes_per_picture": size,
    }


def _counted(config: RunConfig, data_root: Path) -> PictureCheck | str:
    """Return what is made of the pictures, or why they are not counted; FluxtrainError if they are wrong."""
    if remote_sources(config.data, data_root):
        return f"they are at a URL, in shards or in Parquet files; {_TELLS}"
    pictures, skipped, left_out = find_pictures(config, data_root)
    size = sum(picture.file.size for picture in pictures)
    if size > MAX_BYTES:
        return f"{len(pictures):,} of {binary(size)}, more than a plan reads; {_TELLS}"
    check = check_run(config, pictures, skipped, left_out, decodes=False)
    if error := check.refusal(config):
        raise error
    return check
