"""The prepare task: ``fluxtrain prepare cc12m`` or ``coco`` as a pod that reports its progress.

It may be killed at any time; the next attempt resumes after the tars that are complete.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any, NoReturn

from fluxtrain.contract.process import FINISH, STEP, RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.errors import ConfigError, StoppedError
from fluxtrain.fetch.http import is_url
from fluxtrain.parallel.distributed import World
from fluxtrain.prepare import cc12m
from fluxtrain.prepare import coco as coco_subset
from fluxtrain.prepare.cc12m import prepare_cc12m, read_problematic
from fluxtrain.prepare.coco import prepare_coco
from fluxtrain.prepare.download import PREFIX, open_source
from fluxtrain.report.endpoint import Endpoint
from fluxtrain.runtime.progress import handled

Prepare = Callable[..., dict[str, Any]]
"""``prepare_cc12m`` or ``prepare_coco`` with its input bound; returns the report."""
_SECTION = "spec.run.prepare"
_FIELDS = {"--problematic": f"{_SECTION}.problematic", "--samples": f"{_SECTION}.samples"}


def prepare(config: RunConfig, paths: RunPaths, world: World) -> None:
    """Make the data set of ``config.prepare`` on rank 0.

    Raises StoppedError after SIGTERM or SIGINT, and what ``prepare_cc12m`` and ``prepare_coco`` raise.
    """
    with ExitStack() as stack:
        endpoint = Endpoint(config, paths, world)
        if world.local_rank == 0:
            endpoint.start(stack)
        if not world.is_main:
            return endpoint.set_phase(FINISH)
        stack.enter_context(handled(_stop, signal.SIGTERM, signal.SIGINT))
        endpoint.set_phase(STEP)

        def on_progress(done: int, total: int) -> None:
            endpoint.metrics.of_step["step"].set(done)
            endpoint.step_done(step=done, steps=total)

        with _flags_as_fields():
            report = open_task(config, paths)(on_progress=on_progress)
        if "step" not in endpoint.progress.read():  # the data set was complete already
            total = report["kept" if config.prepare.dataset == "cc12m" else "samples"]
            on_progress(total, total)
        endpoint.progress.update(status="success")
        endpoint.set_phase(FINISH)


def open_task(config: RunConfig, paths: RunPaths) -> Prepare:
    """Return the function that makes the data set; ConfigError, naming the field, if its input is missing."""
    with _flags_as_fields():
        return _cc12m(config, paths) if config.prepare.dataset == "cc12m" else _coco(config, paths)


def _cc12m(config: RunConfig, paths: RunPaths) -> Prepare:
    settings = config.prepare
    is_remote = settings.input.startswith(PREFIX) or is_url(settings.input)
    source = open_source(settings.input if is_remote else str(paths.data / settings.input))
    source.names()
    listed = settings.problematic
    return partial(
        prepare_cc12m,
        source,
        paths.data / config.data.train,
        cc12m.NUM_SAMPLES if settings.samples is None else settings.samples or None,
        read_problematic(paths.data / listed) if listed else frozenset(),
        settings.workers,
    )


def _coco(config: RunConfig, paths: RunPaths) -> Prepare:
    settings, folder = config.prepare, paths.data / config.prepare.input
    images, captions = folder / "val2014", folder / "annotations" / "captions_val2014.json"
    for path in (images, captions):
        if not path.exists():
            raise ConfigError(f"{_SECTION}.input", str(folder), f"{path} is missing")
    assert config.data.validation is not None, "needed_data requires it"
    output = paths.data / config.data.validation
    samples = coco_subset.NUM_SAMPLES if settings.samples is None else settings.samples
    return partial(prepare_coco, images, captions, output, samples, settings.workers)


@contextmanager
def _flags_as_fields() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        if error.path.startswith(_SECTION):
            raise
        field = _FIELDS.get(error.path, f"{_SECTION}.input")
        raise ConfigError(field, error.given, error.allowed) from None


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    """Stop at once: a tar takes longer than a pod's termination grace period."""
    raise StoppedError("stopped; complete tars are kept and the same command resumes")
