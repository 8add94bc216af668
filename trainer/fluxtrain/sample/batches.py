"""Samples the images of many prompts: the noise of each, and batches that fit the memory of a step.

Axes: l text tokens, d text width, v pooled width, ch h w latent image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.sampling import SamplingConfig
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
    device: torch.device,
    alive: Callable[[], object] = lambda: None,
) -> list[Latents]:
    """Return the latents "1 ch h w" of each prompt; every rank must call this with the same ones.

    ``negatives`` are the encodings of each prompt's negative prompt. ``alive`` is called after each step.
    """
    config, latents = flow_loss.config, dict[int, Latents]()
    for indices in batches(prompts, config):
        batch = [prompts[index] for index in indices]
        sampled = denoise(
            flow_loss,
            noise_of(batch, config).to(device),
            _stacked([texts[index] for index in indices], device),
            _stacked([negatives[index] for index in indices], device),
            settings_of(batch[0], config),
            alive,
        )
        latents |= zip(indices, torch.split(sampled, 1), strict=True)
    return [latents[index] for index in range(len(prompts))]


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


def batches(prompts: Sequence[Prompt], config: RunConfig) -> Iterator[list[int]]:
    """Yield the indices of ``prompts`` that are sampled at once: alike, and no more than a micro batch."""
    budget = config.parallel.micro_batch_size * config.data.image_size**2
    waiting = dict[tuple[int, int, int, float, float | None], list[int]]()
    for index, each in enumerate(prompts):
        key = each.width, each.height, each.num_steps, each.cfg_scale, each.guidance
        waiting.setdefault(key, []).append(index)
    for (width, height, _, cfg_scale, _), indices in waiting.items():
        size = max(1, budget // (width * height * (1 if cfg_scale == 1 else 2)))
        yield from (indices[start : start + size] for start in range(0, len(indices), size))


def _stacked(texts: Sequence[TextEncoding], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ``texts`` as "b l d" and "b v" on ``device``."""
    txt, vec = zip(*texts, strict=True)
    return torch.stack(txt).to(device), torch.stack(vec).to(device)
