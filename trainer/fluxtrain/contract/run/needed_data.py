"""What a run needs of its data: errors before anything is opened."""

from __future__ import annotations

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.errors import UNSET, ConfigError


def require_data(config: RunConfig, at: str) -> None:
    """Raise ConfigError, with the path below ``at``, if ``config`` asks for what its data cannot give."""
    data = config.data
    if data.images is not None and config.task not in ("train", "evaluate"):
        text = "must be null unless task is train, which encodes the pictures"
        raise ConfigError(f"{at}.data.images", data.images, text)
    if data.validation is None:
        _require_no_validation(config, at)


def _require_no_validation(config: RunConfig, at: str) -> None:
    field, evaluation, sampling = f"{at}.data.validation", config.evaluation, config.sampling
    if config.task in ("prepare", "evaluate"):
        raise ConfigError(field, UNSET, f"must name a folder if task is {config.task}")
    if config.task == "train" and evaluation.is_on:
        text = "must name a folder, or set evaluation.every_samples to 0"
        raise ConfigError(field, UNSET, text)
    samples = sampling.every_steps > 0 or sampling.at_end
    has_prompts = sampling.prompts or sampling.prompt_file is not None
    if config.task == "train" and samples and not has_prompts:
        text = "must hold a prompt: there is no validation set whose prompts could be sampled"
        raise ConfigError(f"{at}.sampling.prompts", UNSET, text)
