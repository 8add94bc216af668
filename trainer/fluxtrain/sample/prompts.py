"""The prompts that a config samples, and what is checked before a training."""

from __future__ import annotations

from pathlib import Path

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.encode.encoders import check_files
from fluxtrain.errors import UNSET, ConfigError
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
