"""The sample task: one image for each prompt, with the prompts divided among the ranks.

An image depends on weights, prompt, index and seed, not on the number of ranks. The PNG's text fields hold
the settings. Existing images are kept.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fluxtrain.adapter.merge import clip_adapters, tell_skipped, with_updates
from fluxtrain.adapter.opening import model_of
from fluxtrain.contract.process import CONFIG_FILE, FINISH, SAMPLE, SAMPLES_FOLDER, RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.encode.codec import load_decoder
from fluxtrain.encode.encoders import check_files
from fluxtrain.encode.text import load_text_encoder
from fluxtrain.errors import UNSET, ConfigError
from fluxtrain.model.flux import Flux
from fluxtrain.model.loss import FlowLoss
from fluxtrain.parallel.distributed import World
from fluxtrain.parallel.parallelize import DTYPES, load_weights
from fluxtrain.report.endpoint import Endpoint
from fluxtrain.runtime.progress import Alive
from fluxtrain.sample.denoise import (
    conditions_of,
    denoise,
    noise_of,
    sample_latents,
    settings_of,
    stacked_conditions,
    to_pil_images,
)
from fluxtrain.sample.grid import save_png, text_fields
from fluxtrain.sample.prompts import Prompt, chosen_prompts
from fluxtrain.state.random_seed import with_any_seed
from fluxtrain.weights.reader import require_same_clip

_POLL_SECONDS = 0.5
TextEncoding = tuple[Tensor, Tensor]  # tokens "1 l d", pooled vector "1 v"


def check_sample_task(config: RunConfig, paths: RunPaths) -> None:
    """Raise ConfigError or DataError if prompts, weights or encoders are missing; nothing is loaded."""
    if not chosen_prompts(with_any_seed(config), paths.data):
        raise ConfigError("spec.run.sampling.prompts", UNSET, "must hold at least one prompt")
    model = model_of(config, paths.models)
    if model is None:
        text = "must name the weights to sample with"
        raise ConfigError("spec.run.initial_weights", UNSET, text)
    require_same_clip(config, paths.models, (file.path for file, _ in clip_adapters(model)))
    check_files(config.encoders, paths.models)


def sample_prompts(config: RunConfig, paths: RunPaths, world: World) -> None:
    """Sample this rank's prompts into ``samples/``, then wait for the other ranks of the node.

    Every rank holds the whole model.
    """
    check_sample_task(config, paths)
    with ExitStack() as stack:
        endpoint = Endpoint(config, paths, world)
        if world.local_rank == 0:
            endpoint.start(stack)
        prompts = chosen_prompts(config, paths.data)
        image_paths = _image_paths(paths, prompts)
        own = range(world.rank, len(image_paths), world.size)
        if missing := [index for index in own if not image_paths[index].exists()]:
            images = [(prompts[index], image_paths[index]) for index in missing]
            _sample(config, paths, world, images, endpoint)
        endpoint.set_phase(FINISH)
        if world.local_rank == 0:
            _wait_for_node(image_paths, world, endpoint)
        endpoint.progress.update(status="success")


def set_aside(config: RunConfig, paths: RunPaths) -> Path | None:
    """Rename the folder of images that another sampling has made, which this one would keep as its own.

    Returns its new path; None if there are none, or this sampling was interrupted. Raises ConfigError if the
    output is that of a run.
    """
    folder, before = paths.output / SAMPLES_FOLDER, dict[str, Any]()
    with suppress(OSError, ValueError):
        before = json.loads((paths.output / CONFIG_FILE).read_text("utf-8"))
    if before.get("task", config.task) != config.task:
        raise ConfigError("--output", str(paths.output), "is the output of a run; name another")
    images = _image_paths(paths, chosen_prompts(with_any_seed(config), paths.data))
    goes_on = before == json.loads(config.model_dump_json())
    if not folder.exists() or (goes_on and not all(path.exists() for path in images)):
        return None
    target = next(
        path
        for number in count(1)
        if not (path := paths.output / f"{SAMPLES_FOLDER}_{number}").exists()
    )
    return folder.rename(target)


def _image_paths(paths: RunPaths, prompts: Sequence[Prompt]) -> list[Path]:
    folder = paths.output / SAMPLES_FOLDER
    return [folder / f"{index:04d}.png" for index in range(len(prompts))]


def _wait_for_node(image_paths: list[Path], world: World, endpoint: Endpoint) -> None:
    """Wait for the images of all ranks of this node; each new one counts as progress."""
    first = world.rank - world.local_rank
    ranks = range(first, first + world.local_size)
    expected = [path for i, path in enumerate(image_paths) if i % world.size in ranks]
    num_done = sum(path.exists() for path in expected)
    while num_done < len(expected):
        time.sleep(_POLL_SECONDS)
        before, num_done = num_done, sum(path.exists() for path in expected)
        if num_done > before:
            endpoint.alive()


def _sample(
    config: RunConfig,
    paths: RunPaths,
    world: World,
    images: Sequence[tuple[Prompt, Path]],
    endpoint: Endpoint,
) -> None:
    prompts = [prompt for prompt, _ in images]
    texts = _encode(config, paths, world, prompts)
    conditions = conditions_of(prompts, config, paths.models, world.device)
    endpoint.alive()
    model = _load_model(config, paths, world, endpoint.alive)
    flow_loss = FlowLoss(model, config, DTYPES[config.precision.compute])
    decode = load_decoder(config.encoders, paths.models, world.device)
    endpoint.progress.update(steps=len(images))
    endpoint.set_phase(SAMPLE)
    for done, ((prompt, path), condition) in enumerate(zip(images, conditions, strict=True), 1):
        start, settings = noise_of([prompt], config).to(world.device), settings_of(prompt, config)
        text, negative = texts[prompt.text], texts[prompt.negative]
        given = stacked_conditions([condition], world.device)
        latents = denoise(flow_loss, start, text, negative, settings, endpoint.alive, given)
        (image,) = to_pil_images(decode(latents))
        save_png(path, image, text_fields(config, prompt))
        endpoint.step_done(step=done)
        print(f"{path}: {prompt.text}", flush=True)


def write_images(
    flow_loss: FlowLoss, paths: RunPaths, world: World, endpoint: Endpoint
) -> list[str]:
    """Sample the prompts of the config with a model that all ranks hold together; rank 0 writes the images.

    Returns their paths relative to the output. Every rank must call this.
    """
    config = flow_loss.config
    prompts = chosen_prompts(config, paths.data)
    if not prompts:
        return []
    encoded = _encode(config, paths, world, prompts)
    texts = {text: (txt[0], vec[0]) for text, (txt, vec) in encoded.items()}
    endpoint.set_phase(SAMPLE)
    own = [texts[each.text] for each in prompts]
    negative = [texts[each.negative] for each in prompts]
    conditions = conditions_of(prompts, config, paths.models, world.device)
    latents = sample_latents(flow_loss, prompts, own, negative, conditions, world, endpoint.alive)
    image_paths = _image_paths(paths, prompts)
    if world.is_main:
        decode = load_decoder(config.encoders, paths.models, world.device)
        for prompt, path, each in zip(prompts, image_paths, latents, strict=True):
            (image,) = to_pil_images(decode(each))
            save_png(path, image, text_fields(config, prompt))
    return [str(path.relative_to(paths.output)) for path in image_paths]


def _load_model(config: RunConfig, paths: RunPaths, world: World, alive: Alive) -> Flux:
    weights = model_of(config, paths.models)
    assert weights is not None
    tell_skipped(weights, world)
    weights.verify(World.alone(), alive)  # other ranks may have no image
    with torch.device("meta"):
        model = Flux(config.model).to(DTYPES[config.precision.compute])
    load_weights(model, weights.read(list(weights.shapes)), world.device, alive)
    return model.eval()


def _encode(
    config: RunConfig, paths: RunPaths, world: World, prompts: Sequence[Prompt]
) -> dict[str, TextEncoding]:
    """Return the encodings of ``prompts`` and of their negative ones by text; the encoder is freed."""
    encoder = load_text_encoder(
        config.encoders,
        config.data.text_length,
        paths.models,
        world.device,
        DTYPES[config.encoders.precision],
    )
    encoder = with_updates(encoder, clip_adapters(model_of(config, paths.models)))
    texts = dict.fromkeys(text for each in prompts for text in (each.text, each.negative))
    return {text: encoder.encode([text]) for text in texts}
