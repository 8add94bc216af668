"""Samples the images of many prompts: the noise of each, and batches that fit the memory
of a step, divided among the ranks.

Axes: l text tokens, d text width, v pooled width, ch h w latent image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.sampling import SamplingConfig
from fluxtrain.distributed import World
from fluxtrain.loss import FlowLoss
from fluxtrain.sample.denoise import Latents, denoise, initial_noise
from fluxtrain.sample.prompt_file import Prompt

TextEncoding = tuple[Tensor, Tensor]
"""Tokens "l d" and pooled vector "v" of a prompt."""


def sample_latents(
    flow_loss: FlowLoss,
    prompts: Sequence[Prompt],
    texts: Sequence[TextEncoding],
    negatives: Sequence[TextEncoding],
    world: World,
    alive: Callable[[], object] = lambda: None,
) -> list[Latents]:
    """Return the latents "1 ch h w" of each prompt; every rank must call this with the same ones.

    Ranks sample different prompts at the same time. ``negatives`` are the encodings of each prompt's negative
    prompt. ``alive`` is called after each step.
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
    noise = []
    for prompt in prompts:
        shape = (config.latent_channels, prompt.height // patch, prompt.width // patch)
        noise.append(initial_noise(prompt.seed, 1, shape, first=prompt.index))
    return torch.cat(noise)


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
    budget = config.parallel.micro_batch_size * config.data.image_size**2
    waiting = dict[tuple[int, int, int, float, float | None], list[int]]()
    for index, each in enumerate(prompts):
        key = each.width, each.height, each.num_steps, each.cfg_scale, each.guidance
        waiting.setdefault(key, []).append(index)
    for (width, height, _, cfg_scale, _), indices in waiting.items():
        size = max(1, budget // (width * height * (1 if cfg_scale == 1 else 2)))
        size = min(size, math.ceil(len(indices) / ranks))
        yield from (indices[start : start + size] for start in range(0, len(indices), size))


def _stacked(texts: Sequence[TextEncoding], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ``texts`` as "b l d" and "b v" on ``device``."""
    txt, vec = zip(*texts, strict=True)
    return torch.stack(txt).to(device), torch.stack(vec).to(device)
