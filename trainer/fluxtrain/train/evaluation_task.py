"""The evaluate task: MLPerf's evaluation of a model, with or without adapters; printed and written as JSON.

The model is divided over the ranks as in training. The result is that of an evaluation during training with
the same weights, seed and validation set.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from fluxtrain import __version__
from fluxtrain.adapter.merge import Added, clip_adapters, tell_skipped, updated, with_updates
from fluxtrain.adapter.opening import checkpoint_of, model_of
from fluxtrain.contract.process import EVALUATE, EVALUATION_FILE, FINISH, RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.dataset import AnyBatch, Batch, Source
from fluxtrain.data.loader import evaluation_batches
from fluxtrain.data.order import PADDING
from fluxtrain.data.sources import open_source
from fluxtrain.encode.encoders import batch_encoder, check_files
from fluxtrain.encode.text import PooledClip, load_clip
from fluxtrain.errors import UNSET, ConfigError, DataError, DivergedError
from fluxtrain.model.loss import FlowLoss
from fluxtrain.parallel.compile import attention_backend, attention_on
from fluxtrain.parallel.distributed import World
from fluxtrain.parallel.parallelize import DTYPES, build_model, uses_fsdp
from fluxtrain.report.endpoint import Endpoint
from fluxtrain.report.records import Evaluation
from fluxtrain.runtime.files import atomic_write, writing
from fluxtrain.sample.prompts import chosen_prompts
from fluxtrain.sample.task import write_images
from fluxtrain.state.random_seed import with_any_seed
from fluxtrain.state.run_state import read_config, read_state
from fluxtrain.train.evaluate import evaluate, require_readable
from fluxtrain.weights.reader import require_same_clip

Encode = Callable[[AnyBatch], Batch]

_MAX_FAULTS = 20
_MOST_WITHOUT_CAPTION = 16
"""Samples of a set that are looked at for captions."""


def check_evaluate_task(config: RunConfig, paths: RunPaths) -> None:
    """Raise ConfigError or DataError if weights, adapters or the validation set are missing or do not fit."""
    model = model_of(config, paths.models)
    if model is None:
        text = "must name the weights to evaluate"
        raise ConfigError("spec.run.initial_weights", UNSET, text)
    source = open_source(config, paths.data, "validation")
    if added := clip_adapters(model):
        _require_captions(config, source, added)
        require_same_clip(config, paths.models, (file.path for file, _ in added))
    if chosen_prompts(with_any_seed(config), paths.data):
        check_files(config.encoders, paths.models)


def evaluate_model(config: RunConfig, paths: RunPaths, world: World) -> None:
    """Evaluate the model of ``config`` on all ranks; rank 0 prints the result and writes evaluation.json.

    Images of the config's prompts, if it has some, are sampled too.

    Raises DataError if too many samples are unreadable, DivergedError if the loss is not finite.
    """
    with ExitStack() as stack:
        endpoint = Endpoint(config, paths, world)
        if world.local_rank == 0:
            endpoint.start(stack)
        attention_on(world.device, config)  # a device that lacks it is refused
        stack.enter_context(attention_backend(config.parallel.attention))
        source = _validation_set(config, paths, world)
        encode = _encoder(config, source, paths, world)  # may refuse the set
        if world.is_main:
            for text in differences(config, paths):
                print(f"fluxtrain: {text}", file=sys.stderr, flush=True)
        flow_loss = _load(config, paths, world, endpoint)
        endpoint.set_phase(EVALUATE)
        begin = time.monotonic()
        result = _evaluate(flow_loss, source, encode, world, endpoint)
        endpoint.metrics.eval_loss.set(result.loss)
        require_readable(result, config)
        if not math.isfinite(result.loss):
            raise DivergedError(f"the evaluation loss of {config.initial_weights} is {result.loss}")
        endpoint.progress.update(evalLoss=result.loss)
        seconds = time.monotonic() - begin
        images = write_images(flow_loss, paths, world, endpoint)
        if world.is_main:
            found = describe(config, paths, result, seconds) | {"images": images}
            _write(paths, found)
            _print(found)
        endpoint.set_phase(FINISH)
        endpoint.progress.update(status="success")


def _validation_set(config: RunConfig, paths: RunPaths, world: World) -> Source:
    if config.data.source == "synthetic":
        return open_source(config, paths.data, "validation")
    return world.from_main(lambda: open_source(config, paths.data, "validation"))


def _load(config: RunConfig, paths: RunPaths, world: World, endpoint: Endpoint) -> FlowLoss:
    weights = model_of(config, paths.models)
    assert weights is not None
    tell_skipped(weights, world)
    weights.verify(world, endpoint.alive)
    model = build_model(config, world, weights.read(list(weights.shapes)), endpoint.alive)
    compute = DTYPES[config.precision.compute]
    if not uses_fsdp(config, world.size):
        model.to(compute)
    return FlowLoss(model.eval(), config, compute)


def _evaluate(
    flow_loss: FlowLoss,
    source: Source,
    encode: Encode,
    world: World,
    endpoint: Endpoint,
) -> Evaluation:
    config = flow_loss.config
    pin = world.device.type == "cuda"
    batches = evaluation_batches(config, source, world.rank, world.size, pin=pin)
    endpoint.progress.update(samples=0)
    done = 0

    def advance(samples: int) -> None:
        nonlocal done
        done = min(done + samples, len(source))
        endpoint.progress.update(samples=done)
        endpoint.alive()

    return evaluate(flow_loss, map(encode, batches), world, advance)


def _encoder(config: RunConfig, source: Source, paths: RunPaths, world: World) -> Encode:
    """Return the function that encodes batches of ``source`` with the adapters of CLIP, if there are some."""
    added = clip_adapters(model_of(config, paths.models))
    if added:
        _require_captions(config, source, added)
    encode = batch_encoder(config, paths.models, world.device, partial(with_updates, added=added))
    if not added or config.data.source == "images":
        return encode
    # in the data type of the training, which computes the vectors in each step
    clip = load_clip(config.encoders, paths.models, DTYPES[config.precision.compute])
    adapted = PooledClip(updated(clip.on(world.device), added))
    return partial(_with_pooled, encode, source, adapted)


def _require_captions(config: RunConfig, source: Source, added: Added) -> None:
    """Raise DataError unless CLIP, to which ``added`` are added, encodes captions of ``source``."""
    path = added[0][0].path
    if config.encoders.text != "t5-clip":
        raise DataError(f"{path}: it adapts CLIP-L, and spec.run.encoders.text is minilm")
    if not any(source.caption(index) for index in range(min(len(source), _MOST_WITHOUT_CAPTION))):
        raise DataError(
            f"{path}: it adapts CLIP-L, and the samples of spec.run.data.validation have no "
            "captions, of which its pooled vectors would be computed"
        )


def _with_pooled(encode: Encode, source: Source, clip: PooledClip, batch: AnyBatch) -> Batch:
    """Return ``batch`` encoded, with CLIP's pooled vectors of the captions of its samples."""
    indices = batch.indices.tolist()
    captions = ["" if index == PADDING else source.caption(index) for index in indices]
    return replace(encode(batch), vec=clip.encode(captions))


def differences(config: RunConfig, paths: RunPaths) -> list[str]:
    """Return in what the model differs from the one that its training evaluated, a sentence each."""
    found = []
    for name in (config.initial_weights, *(each.path for each in config.added_adapters)):
        path = paths.models / str(name)
        checkpoint = checkpoint_of(path)
        run = read_config(checkpoint) if checkpoint else {}
        if (run.get("adapter") or {}).get("base_dtype", "compute") != "compute":
            found.append(
                f"{path}: the training evaluated rounded base weights; this has the given ones"
            )
    return found


def describe(
    config: RunConfig, paths: RunPaths, result: Evaluation, seconds: float
) -> dict[str, Any]:
    """Return what evaluation.json holds; losses as in metrics.jsonl, the time in seconds."""
    checkpoint = checkpoint_of(paths.models / str(config.initial_weights))
    return {
        "weights": config.initial_weights,
        "step": read_state(checkpoint).step if checkpoint else None,
        "adapters": [each.model_dump() for each in config.added_adapters],
        "validation": config.data.validation if config.data.source != "synthetic" else "synthetic",
        "seed": config.drawn_seed,
        "precision": config.precision.compute,
        "reference_rounding": config.flow.reference_rounding,
        "differences": differences(config, paths),
        "eval_loss": result.loss,
        "eval_loss_by_timestep": result.by_timestep,
        "eval_samples": result.num_samples,
        "unreadable_samples": len(result.faults),
        "unreadable": list(result.faults[:_MAX_FAULTS]),
        "seconds": round(seconds, 3),
        "fluxtrain": __version__,
    }


def _write(paths: RunPaths, found: dict[str, Any]) -> None:
    path = paths.output / EVALUATION_FILE
    with writing(path), atomic_write(path) as partial:
        partial.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(f"{path}:", flush=True)


def _print(found: dict[str, Any]) -> None:
    bad = found["unreadable_samples"]
    print(
        f"evaluation loss {found['eval_loss']:.5f} on {found['eval_samples']} samples"
        + (f", {bad} could not be read" if bad else "")
    )
    for index, loss in enumerate(found["eval_loss_by_timestep"]):
        print(f"  t = {index}/8  {'no sample' if loss is None else format(loss, '.5f')}")
