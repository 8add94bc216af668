"""The sample task: one picture for each prompt, the prompts divided over the ranks.

A picture depends on weights, prompt, its place in the list and the seed, not on the number of ranks. Each
PNG carries in its text fields what made it. Images that are there already are kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from fluxtrain import __version__
from fluxtrain.contract.launch import SAMPLES_FOLDER, RunPaths
from fluxtrain.contract.progress import COMPLETE, FINISHING, SAMPLING
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.distributed import World
from fluxtrain.encode.codec import load_decoder
from fluxtrain.encode.encoders import check_files
from fluxtrain.encode.text import load_text_encoder
from fluxtrain.errors import UNSET, ConfigError, StorageError
from fluxtrain.files import atomic_write
from fluxtrain.loss import FlowLoss
from fluxtrain.model.flux import Flux
from fluxtrain.parallelize import DTYPES, load_weights
from fluxtrain.report.endpoint import Endpoint
from fluxtrain.sample.denoise import denoise, initial_noise, to_pil_images
from fluxtrain.weights.reader import published_weights

_POLL_SECONDS = 0.5
Text = tuple[Tensor, Tensor]  # tokens "1 l d", pooled vector "1 v"


def check_sample_task(config: RunConfig, paths: RunPaths) -> None:
    """Raise for what would only be found out after the model is loaded."""
    if not config.sampling.prompts:
        raise ConfigError("spec.run.sampling.prompts", UNSET, "must name what to draw")
    if published_weights(config, paths.models) is None:
        text = "must name the weights to draw with"
        raise ConfigError("spec.run.initial_weights", UNSET, text)
    check_files(config.encoders, paths.models)


def sample_prompts(config: RunConfig, paths: RunPaths, world: World) -> None:
    """Draw this rank's prompts into ``samples/``, and be watched until this node's are all there.

    Every rank holds the whole model.
    """
    check_sample_task(config, paths)
    with ExitStack() as stack:
        endpoint = Endpoint(config, paths, world)
        if world.local_rank == 0:
            endpoint.open(stack)
        image_paths = _image_paths(config, paths)
        own = [
            i
            for i in range(world.rank, len(image_paths), world.size)
            if not image_paths[i].exists()
        ]
        if own:
            _draw(config, paths, world, own, endpoint)
        endpoint.enter(FINISHING)
        if world.local_rank == 0:
            _wait_for_node(image_paths, world, endpoint)
        endpoint.progress.update(status="success")
        endpoint.enter(COMPLETE)


def _image_paths(config: RunConfig, paths: RunPaths) -> list[Path]:
    folder = paths.output / SAMPLES_FOLDER
    return [folder / f"{index:04d}.png" for index in range(len(config.sampling.prompts))]


def _wait_for_node(image_paths: list[Path], world: World, endpoint: Endpoint) -> None:
    """Wait until the ranks of this node have drawn their prompts; each picture is a sign of progress."""
    first = world.rank - world.local_rank
    ranks = range(first, first + world.local_size)
    wanted = [path for i, path in enumerate(image_paths) if i % world.size in ranks]
    there = sum(path.exists() for path in wanted)
    while there < len(wanted):
        time.sleep(_POLL_SECONDS)
        before, there = there, sum(path.exists() for path in wanted)
        if there > before:
            endpoint.alive()


def _draw(
    config: RunConfig, paths: RunPaths, world: World, own: list[int], endpoint: Endpoint
) -> None:
    image_paths = _image_paths(config, paths)
    texts = _encode(config, paths, world, [config.sampling.prompts[index] for index in own])
    empty = texts[-1]
    endpoint.alive()
    model = _load(config, paths, world, endpoint.alive)
    painter = FlowLoss(model, config, DTYPES[config.precision.compute])
    decode = load_decoder(config.encoders, paths.models, world.device)
    noise = initial_noise(config.seed, max(own) + 1, config.latent_shape).to(world.device)
    endpoint.progress.update(steps=len(own))
    endpoint.enter(SAMPLING)
    for done, (index, text) in enumerate(zip(own, texts, strict=False), 1):
        start = noise[index : index + 1]
        latents = denoise(painter, start, text, empty, config.sampling, endpoint.alive)
        (picture,) = to_pil_images(decode(latents))
        _save(image_paths[index], picture, _facts(config, index))
        endpoint.stepped(step=done)
        print(f"{image_paths[index]}: {config.sampling.prompts[index]}", flush=True)


def _load(config: RunConfig, paths: RunPaths, world: World, alive: Callable[[], None]) -> Flux:
    weights = published_weights(config, paths.models)
    assert weights is not None
    with torch.device("meta"):
        model = Flux(config.model).to(DTYPES[config.precision.compute])
    load_weights(model, weights, world.device, alive)
    return model.eval()


def _encode(config: RunConfig, paths: RunPaths, world: World, prompts: list[str]) -> list[Text]:
    """Return the encodings of ``prompts`` and, last, of the empty one; the encoder is freed again."""
    encoder = load_text_encoder(
        config.encoders,
        config.data.text_length,
        paths.models,
        world.device,
        DTYPES[config.encoders.precision],
    )
    return [encoder.encode([prompt]) for prompt in [*prompts, ""]]


def _facts(config: RunConfig, index: int) -> dict[str, str]:
    sampling = config.sampling
    facts = {
        "prompt": sampling.prompts[index],
        "seed": str(config.seed),
        "index": str(index),
        "steps": str(sampling.num_steps),
        "time_shift": sampling.time_shift,
        "cfg_scale": str(sampling.cfg_scale),
        "weights": str(config.initial_weights),
        "Software": f"fluxtrain {__version__}",
    }
    if config.model.guidance_embed:
        facts["guidance"] = str(sampling.guidance)
    return facts


def _save(path: Path, picture: Image.Image, facts: dict[str, str]) -> None:
    info = PngInfo()
    for key, text in facts.items():
        info.add_itxt(key, text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as partial:
            picture.save(partial, format="png", pnginfo=info)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror})") from None
