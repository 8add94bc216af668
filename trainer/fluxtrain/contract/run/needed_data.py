"""What a run needs of its data: errors before anything is opened."""

from __future__ import annotations

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.errors import UNSET, ConfigError


def require_data(config: RunConfig, at: str) -> None:
    """Raise ConfigError, with the path below ``at``, if ``config`` asks for what its data cannot give."""
    data = config.data
    if data.images is not None and config.task not in ("train", "evaluate"):
        text = "must be null unless task is train, which encodes the pictures"
        if config.task == "benchmark":
            text = "must be null if task is benchmark: set data.source to synthetic, with the same sizes"
        raise ConfigError(f"{at}.data.images", data.images, text)
    if data.validation_split:
        _require_split(config, at)
    elif data.validation is None:
        _require_no_validation(config, at)


def _require_split(config: RunConfig, at: str) -> None:
    field = f"{at}.data.validation_split"
    if config.data.validation is not None:
        text = "must be none if validation_split is set, which holds pictures out"
        raise ConfigError(f"{at}.data.validation", config.data.validation, text)
    if config.task != "train":
        raise ConfigError(field, config.data.validation_split, "must be 0 unless task is train")
    if not config.evaluation.is_on:
        text = "needs an evaluation: set evaluation.every_samples, at_start or at_end"
        raise ConfigError(field, config.data.validation_split, text)


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
