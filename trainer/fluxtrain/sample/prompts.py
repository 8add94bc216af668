"""What is sampled: the prompts of a config, the noise of each image, and batches that fit the memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.sampling import SamplingConfig
from fluxtrain.encode.encoders import check_files
from fluxtrain.errors import UNSET, ConfigError
from fluxtrain.sample.denoise import Latents, initial_noise
from fluxtrain.sample.prompt_file import Prompt, plain_prompts, read_prompts


def chosen_prompts(config: RunConfig, data_root: Path) -> list[Prompt]:
    """Return ``sampling.prompts``, then those of ``sampling.prompt_file``; ConfigError if a line is wrong."""
    sampling = config.sampling
    prompts = plain_prompts(config, sampling.prompts)
    if sampling.prompt_file is not None:
        prompts += read_prompts(data_root / sampling.prompt_file, config, len(prompts))
    return prompts


def check_sampling(config: RunConfig, data_root: Path, models_root: Path) -> None:
    """Raise ConfigError or DataError, before a training, if it could not sample its images later.

    The prompt file is read; encoders must exist and are not loaded.
    """
    if not config.sampling.is_on:
        return
    prompts = chosen_prompts(config, data_root)
    if not prompts and not config.sampling.num_validation_prompts:
        text = "must be at least 1 without prompts and prompt_file"
        raise ConfigError("spec.run.sampling.num_prompts", UNSET, text)
    needs_text = bool(prompts) or config.data.source == "images"
    check_files(config.encoders, models_root, with_text=needs_text)


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
