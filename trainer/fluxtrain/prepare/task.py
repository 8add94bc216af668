"""The prepare task: what ``fluxtrain prepare cc12m`` and ``coco`` do, as one pod that can be watched.

It may be killed at any moment; the next attempt goes on from the tars that are done.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any, NoReturn

from fluxtrain.contract.launch import RunPaths
from fluxtrain.contract.progress import COMPLETE, FINISHING, RUNNING
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.distributed import World
from fluxtrain.errors import ConfigError, StoppedError
from fluxtrain.prepare.cc12m import build as cc12m
from fluxtrain.prepare.cc12m.build import prepare_cc12m, read_problematic
from fluxtrain.prepare.cc12m.source import open_source
from fluxtrain.prepare.coco import subset as coco_subset
from fluxtrain.prepare.coco.build import prepare_coco
from fluxtrain.prepare.download.http import is_url
from fluxtrain.prepare.download.hub import PREFIX
from fluxtrain.report.endpoint import Endpoint
from fluxtrain.signals import handled

Make = Callable[..., Any]
_SECTION = "spec.run.prepare"
_FIELDS = {"--problematic": f"{_SECTION}.problematic", "--samples": f"{_SECTION}.samples"}


def prepare(config: RunConfig, paths: RunPaths, world: World) -> None:
    """Make the data set that ``config.prepare`` asks for, on rank 0 alone.

    Raises StoppedError when it was asked to stop, and what ``prepare_cc12m`` and ``prepare_coco`` raise.
    """
    with ExitStack() as stack:
        endpoint = Endpoint(config, paths, world)
        if world.local_rank == 0:
            endpoint.open(stack)
        if not world.is_main:
            return endpoint.enter(FINISHING)
        stack.enter_context(handled(_stop, signal.SIGTERM, signal.SIGINT))
        endpoint.enter(RUNNING)

        def follow(done: int, total: int) -> None:
            endpoint.metrics.step.set(done)
            endpoint.stepped(step=done, steps=total)

        with _as_fields():
            report = open_task(config, paths)(follow=follow)
        if "step" not in endpoint.progress.read():  # everything was there already
            made = report["kept" if config.prepare.dataset == "cc12m" else "samples"]
            follow(made, made)
        endpoint.progress.update(status="success")
        endpoint.enter(COMPLETE)


def open_task(config: RunConfig, paths: RunPaths) -> Make:
    """Return what makes the data set; raises ConfigError with the field where its input is not there."""
    with _as_fields():
        return _cc12m(config, paths) if config.prepare.dataset == "cc12m" else _coco(config, paths)


def _cc12m(config: RunConfig, paths: RunPaths) -> Make:
    asked, given = config.prepare, config.prepare.input
    listed = asked.problematic
    source = open_source(given if _is_remote(given) else str(paths.data / given))
    source.names()
    return partial(
        prepare_cc12m,
        source,
        paths.data / config.data.train,
        cc12m.NUM_SAMPLES if asked.samples is None else asked.samples or None,
        read_problematic(paths.data / listed) if listed else frozenset(),
        asked.workers,
    )


def _coco(config: RunConfig, paths: RunPaths) -> Make:
    asked, folder = config.prepare, paths.data / config.prepare.input
    images, captions = folder / "val2014", folder / "annotations" / "captions_val2014.json"
    for path in (images, captions):
        if not path.exists():
            raise ConfigError(f"{_SECTION}.input", str(folder), f"{path} is not there")
    output = paths.data / config.data.validation
    samples = coco_subset.NUM_SAMPLES if asked.samples is None else asked.samples
    return partial(prepare_coco, images, captions, output, samples, asked.workers)


def _is_remote(given: str) -> bool:
    return given.startswith(PREFIX) or is_url(given)


@contextmanager
def _as_fields() -> Iterator[None]:
    """Name the fields of the file in place of the flags of ``fluxtrain prepare``."""
    try:
        yield
    except ConfigError as error:
        path = _FIELDS.get(error.path, f"{_SECTION}.input")
        known = error.path.startswith(_SECTION)
        raise error if known else ConfigError(path, error.given, error.allowed) from None


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    """Stop at once: a tar takes longer than a pod's time to leave."""
    raise StoppedError("stopped; the tars so far are kept, the same command goes on")
