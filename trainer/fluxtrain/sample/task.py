"""The sample task: one image for each prompt, with the prompts divided among the ranks.

An image depends on weights, prompt, index and seed, not on the number of ranks. The PNG's text fields hold
the settings. Existing images are kept.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from fluxtrain import __version__
from fluxtrain.adapter.opening import model_of
from fluxtrain.contract.launch import SAMPLES_FOLDER, RunPaths
from fluxtrain.contract.progress import FINISH, SAMPLE
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
from fluxtrain.progress import Alive
from fluxtrain.report.endpoint import Endpoint
from fluxtrain.sample.denoise import denoise, initial_noise, to_pil_images

_POLL_SECONDS = 0.5
TextEncoding = tuple[Tensor, Tensor]  # tokens "1 l d", pooled vector "1 v"


def check_sample_task(config: RunConfig, paths: RunPaths) -> None:
    """Raise ConfigError or DataError if prompts, weights or encoders are missing; nothing is loaded."""
    if not config.sampling.prompts:
        raise ConfigError("spec.run.sampling.prompts", UNSET, "must hold at least one prompt")
    if model_of(config, paths.models) is None:
        text = "must name the weights to sample with"
        raise ConfigError("spec.run.initial_weights", UNSET, text)
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
        image_paths = _image_paths(config, paths)
        own = range(world.rank, len(image_paths), world.size)
        if missing := [index for index in own if not image_paths[index].exists()]:
            _sample(config, paths, world, missing, endpoint)
        endpoint.set_phase(FINISH)
        if world.local_rank == 0:
            _wait_for_node(image_paths, world, endpoint)
        endpoint.progress.update(status="success")


def _image_paths(config: RunConfig, paths: RunPaths) -> list[Path]:
    folder = paths.output / SAMPLES_FOLDER
    return [folder / f"{index:04d}.png" for index in range(len(config.sampling.prompts))]


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
    config: RunConfig, paths: RunPaths, world: World, indices: list[int], endpoint: Endpoint
) -> None:
    image_paths = _image_paths(config, paths)
    texts = _encode(config, paths, world, [config.sampling.prompts[index] for index in indices])
    empty = texts[-1]
    endpoint.alive()
    model = _load_model(config, paths, world, endpoint.alive)
    flow_loss = FlowLoss(model, config, DTYPES[config.precision.compute])
    decode = load_decoder(config.encoders, paths.models, world.device)
    noise = initial_noise(config.drawn_seed, max(indices) + 1, config.latent_shape).to(world.device)
    endpoint.progress.update(steps=len(indices))
    endpoint.set_phase(SAMPLE)
    for done, (index, text) in enumerate(zip(indices, texts, strict=False), 1):
        start = noise[index : index + 1]
        latents = denoise(flow_loss, start, text, empty, config.sampling, endpoint.alive)
        (image,) = to_pil_images(decode(latents))
        _save(image_paths[index], image, _text_fields(config, index))
        endpoint.step_done(step=done)
        print(f"{image_paths[index]}: {config.sampling.prompts[index]}", flush=True)


def _load_model(config: RunConfig, paths: RunPaths, world: World, alive: Alive) -> Flux:
    weights = model_of(config, paths.models)
    assert weights is not None
    weights.verify(World.alone(), alive)  # other ranks may have no image
    with torch.device("meta"):
        model = Flux(config.model).to(DTYPES[config.precision.compute])
    load_weights(model, weights.read(list(weights.shapes)), world.device, alive)
    return model.eval()


def _encode(
    config: RunConfig, paths: RunPaths, world: World, prompts: list[str]
) -> list[TextEncoding]:
    """Return the encodings of ``prompts`` and, last, of the empty prompt; the encoder is freed."""
    encoder = load_text_encoder(
        config.encoders,
        config.data.text_length,
        paths.models,
        world.device,
        DTYPES[config.encoders.precision],
    )
    return [encoder.encode([prompt]) for prompt in [*prompts, ""]]


def _text_fields(config: RunConfig, index: int) -> dict[str, str]:
    sampling = config.sampling
    fields = {
        "prompt": sampling.prompts[index],
        "seed": str(config.drawn_seed),
        "index": str(index),
        "steps": str(sampling.num_steps),
        "time_shift": sampling.time_shift,
        "cfg_scale": str(sampling.cfg_scale),
        "weights": str(config.initial_weights),
        "adapters": ", ".join(f"{each.path}:{each.strength:g}" for each in config.added_adapters),
        "Software": f"fluxtrain {__version__}",
    }
    if config.model.guidance_embed:
        fields["guidance"] = str(sampling.guidance)
    return fields


def _save(path: Path, image: Image.Image, fields: dict[str, str]) -> None:
    info = PngInfo()
    for key, text in fields.items():
        info.add_itxt(key, text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as partial:
            image.save(partial, format="png", pnginfo=info)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror})") from None
