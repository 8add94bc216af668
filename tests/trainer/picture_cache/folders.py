"""Folders of pictures as people have them, and runs on them."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from cluster.free_ports import free_port
from PIL import Image
from tests.trainer.tiny_encoders import SIDE, TOKENS, caption, small_image

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.parallel.distributed import StopRequest, World, process_group
from fluxtrain.picture_cache.stage import cache_pictures
from fluxtrain.picture_cache.work import CachedPictures

RUN: dict[str, Any] = {
    "preset": "micro",
    "data": {
        "source": "encoded",
        "images": "pictures",
        "validation": None,
        "image_size": SIDE,
        "latent_size": SIDE // 8,
        "text_length": TOKENS,
    },
    "encoders": {"precision": "float32"},
    "schedule": {"steps": 3, "global_batch_size": 4, "warmup_steps": 0},
    "evaluation": {"every_samples": 0, "at_end": False},
    "checkpoint": {"every_steps": 0},
    "logging": {"every_steps": 1, "metrics_port": 0, "ledger": True},
}
"""``spec.run`` of three steps on the folder ``pictures``."""


def config(**changes: Any) -> RunConfig:
    return resolve(merge(RUN, changes))


def file_of(image: Image.Image, kind: str, **options: Any) -> bytes:
    """Return ``image`` as a file of ``kind``, such as PNG."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Return an image of random pixels."""
    channels = len(Image.new(mode, (1, 1)).getbands())
    shape = (height, width, channels) if channels > 1 else (height, width)
    values = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return Image.fromarray(values, mode)


def write_pictures(folder: Path, count: int) -> Path:
    """Write ``count`` pictures in turn as PNG, JPEG and WebP, of several sizes, with captions beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        kind, suffix = (("PNG", "png"), ("JPEG", "jpg"), ("WEBP", "webp"))[index % 3]
        image = small_image(index, SIDE + 8 * (index % 4)).resize((SIDE + index, 2 * SIDE))
        (folder / f"{index:03d}.{suffix}").write_bytes(file_of(image, kind))
        (folder / f"{index:03d}.txt").write_text(caption(index))
    return folder


def cache(config: RunConfig, paths: RunPaths, world: World, is_new: bool = True) -> CachedPictures:
    """Fill the cache on one rank."""
    return cache_pictures(config, paths, world, StopRequest(world), lambda: None, is_new)


def train(run: RunConfig, paths: RunPaths, size: int = 1) -> None:
    """Train on ``size`` ranks."""
    from tests.trainer import in_process, ranks

    port = free_port()
    each = ranks.train_alone if size == 1 else partial(ranks.train_together, port=port)
    assert in_process.finish(each, run, paths, size) == [0] * size, ranks.output_of(paths)


def cache_together(config: RunConfig, paths: RunPaths, world: World, *, port: int) -> None:
    """Fill the cache as one of several ranks, in a process group whose store is on ``port``."""
    from tests.trainer.ranks import set_environment

    set_environment(world, port)
    with process_group() as joined:
        stop = StopRequest(joined)
        stop.install()
        cache_pictures(config, paths, joined, stop, lambda: None)
