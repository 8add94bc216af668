"""Sampling by Euler steps from noise to latents, divided among the ranks, and images in 8-bit RGB.

Axes: b batch, l text tokens, d text width, v pooled width, ch h w latent image, H W image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.precision import SamplingConfig
from fluxtrain.data.order import Placement
from fluxtrain.data.pictures.picture import PictureError, control_of, read_bytes
from fluxtrain.encode.codec import condition_of, load_codec, scaled
from fluxtrain.errors import DataError
from fluxtrain.model import loss
from fluxtrain.model.loss import FlowLoss
from fluxtrain.parallel.distributed import World
from fluxtrain.runtime import draws
from fluxtrain.sample.prompts import Prompt

Latents = Float[Tensor, "b ch h w"]


def initial_noise(seed: int, index: int, shape: tuple[int, int, int]) -> Float[Tensor, "ch h w"]:
    """Return the noise of the image with number ``index``; it depends on seed and number only."""
    generator = draws.generator(seed, draws.SAMPLING, index)
    return torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))


@torch.no_grad()
def denoise(
    flow_loss: FlowLoss,
    noise: Latents,
    prompts: tuple[Tensor, Tensor],
    empty: tuple[Tensor, Tensor],
    sampling: SamplingConfig,
    on_step: Callable[[], object] = lambda: None,
    condition: Latents | None = None,
) -> Latents:
    """Return the autoencoder's latents, integrated from ``noise`` at t=1 to t=0.

    ``prompts`` and ``empty`` are text tokens "b l d" and pooled vectors "b v". With a ``cfg_scale`` other
    than 1 each step extrapolates from the velocity of ``empty``, the empty or a negative prompt
    (classifier-free guidance). ``condition`` is that of the model, of each image. ``on_step`` is called after
    each step.
    """
    cfg_scale = sampling.cfg_scale
    txt, vec = prompts
    if uses_cfg := cfg_scale != 1:
        txt, vec = torch.cat([txt, empty[0]]), torch.cat([vec, empty[1]])
        condition = None if condition is None else torch.cat([condition, condition])
    image_tokens = noise.shape[-2] * noise.shape[-1] // 4
    times = loss.sampling_times(sampling.num_steps, image_tokens, sampling.time_shift)
    x = noise
    for t, next_t in pairwise(times.to(noise.device)):
        batch = torch.cat([x, x]) if uses_cfg else x
        at = t.expand(len(batch))
        velocity = flow_loss.predict(batch, txt, vec, at, sampling.guidance, condition).float()
        if uses_cfg:
            conditional, unconditional = velocity.chunk(2)
            velocity = unconditional + cfg_scale * (conditional - unconditional)
        x = x + (next_t - t) * velocity
        on_step()
    encoders = flow_loss.config.encoders
    return x / encoders.latent_scale + encoders.latent_shift


def to_pil_images(images: Float[Tensor, "b 3 H W"]) -> list[Image.Image]:
    """Return images in [-1, 1] as 8-bit RGB."""
    pixels = ((images.float().clamp(-1, 1) + 1) * 127.5).round().byte().cpu()
    return [Image.fromarray(rearrange(image, "c h w -> h w c").numpy()) for image in pixels]


TextEncoding = tuple[Tensor, Tensor]
"""Tokens "l d" and pooled vector "v" of a prompt."""
Condition = Float[Tensor, "e h w"] | None
"""Latents of a prompt's condition."""


@torch.no_grad()
def conditions_of(
    prompts: Sequence[Prompt], config: RunConfig, models_root: Path, device: torch.device
) -> list[Condition]:
    """Return the condition of each of ``prompts``: of its control, covering its size; None without one."""
    if not any(prompt.control for prompt in prompts):
        return [None] * len(prompts)
    codec, found = load_codec(config.encoders, models_root).to(device), list[Condition]()
    for prompt in prompts:
        if prompt.control is None:
            found.append(None)
            continue
        size = prompt.width, prompt.height
        place = Placement(size, size)
        image, *masks = (
            scaled(_control_at(path, place, is_mask), device, torch.float32)
            for path, is_mask in ((prompt.control, False), (prompt.mask, True))
            if path is not None
        )
        control = masks[0] if masks else image
        found.append(condition_of(codec, image, control, config.model.condition)[0].cpu())
    return found


def _control_at(path: Path, place: Placement, is_mask: bool) -> UInt8[Tensor, "3 H W"]:
    try:
        return control_of(read_bytes(path), place.size, place, None, is_mask)
    except PictureError as error:
        raise DataError(f"{path}: {str(error).removeprefix('its control: ')}") from None


def stacked_conditions(
    conditions: Sequence[Condition], device: torch.device
) -> Float[Tensor, "b e h w"] | None:
    """Return ``conditions``, all or none of which are None, as one batch on ``device``."""
    given = [each for each in conditions if each is not None]
    return torch.stack(given).to(device) if given else None


def sample_latents(
    flow_loss: FlowLoss,
    prompts: Sequence[Prompt],
    texts: Sequence[TextEncoding],
    negatives: Sequence[TextEncoding],
    conditions: Sequence[Condition],
    world: World,
    alive: Callable[[], object] = lambda: None,
) -> list[Latents]:
    """Return the latents "1 ch h w" of each prompt; every rank must call this with the same ones.

    Ranks sample different prompts at the same time. ``negatives`` are the encodings of each prompt's negative
    prompt, ``conditions`` those of its picture. ``alive`` is called after each step.
    """
    config, device = flow_loss.config, world.device
    latents = [torch.zeros_like(noise_of([prompt], config), device=device) for prompt in prompts]
    for turn in turns(prompts, config, world.size):
        indices = turn[world.rank % len(turn)]
        batch = [prompts[index] for index in indices]
        sampled = denoise(
            flow_loss,
            noise_of(batch, config).to(device),
            _stacked([texts[index] for index in indices], device),
            _stacked([negatives[index] for index in indices], device),
            settings_of(batch[0], config),
            alive,
            stacked_conditions([conditions[index] for index in indices], device),
        )
        if world.rank < len(turn):
            for index, each in zip(indices, torch.split(sampled, 1), strict=True):
                latents[index] = each.contiguous()
    return [world.all_sum(each) for each in latents]


def settings_of(prompt: Prompt, config: RunConfig) -> SamplingConfig:
    """Return ``config.sampling`` with the steps and guidance of ``prompt``."""
    values: dict[str, object] = {"num_steps": prompt.num_steps, "cfg_scale": prompt.cfg_scale}
    if prompt.guidance is not None:
        values["guidance"] = prompt.guidance
    return config.sampling.model_copy(update=values)


def noise_of(prompts: Sequence[Prompt], config: RunConfig) -> Latents:
    """Return the noise of ``prompts``, which have one size; each depends on seed, index and size only."""
    patch = config.data.image_size // config.data.latent_size
    shape = (config.latent_channels, prompts[0].height // patch, prompts[0].width // patch)
    return torch.stack([initial_noise(each.seed, each.index, shape) for each in prompts])


def turns(prompts: Sequence[Prompt], config: RunConfig, ranks: int) -> Iterator[list[list[int]]]:
    """Yield lists of up to ``ranks`` batches that take equally many steps: ranks sample them together.

    Each forward pass has collectives, so ranks without a batch of their own repeat another's.
    """
    waiting = dict[int, list[list[int]]]()
    for indices in batches(prompts, config, ranks):
        waiting.setdefault(prompts[indices[0]].num_steps, []).append(indices)
    for alike in waiting.values():
        yield from (alike[start : start + ranks] for start in range(0, len(alike), ranks))


def batches(prompts: Sequence[Prompt], config: RunConfig, ranks: int = 1) -> Iterator[list[int]]:
    """Yield the indices of ``prompts`` that a rank samples at once: alike, and no more than a micro batch."""
    budget = config.parallel.most_samples * config.data.image_size**2
    waiting = dict[tuple[int, int, int, float, float | None, bool], list[int]]()
    for index, each in enumerate(prompts):
        settings = each.width, each.height, each.num_steps, each.cfg_scale, each.guidance
        waiting.setdefault((*settings, each.control is None), []).append(index)
    for (width, height, _, cfg_scale, *_), indices in waiting.items():
        size = max(1, budget // (width * height * (1 if cfg_scale == 1 else 2)))
        size = min(size, math.ceil(len(indices) / ranks))
        yield from (indices[start : start + size] for start in range(0, len(indices), size))


def _stacked(texts: Sequence[TextEncoding], device: torch.device) -> tuple[Tensor, Tensor]:
    txt, vec = zip(*texts, strict=True)
    return torch.stack(txt).to(device), torch.stack(vec).to(device)
