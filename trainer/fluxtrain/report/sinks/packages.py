"""Whether the packages of the sinks that a run uses are installed; none is imported."""

from __future__ import annotations

from importlib.util import find_spec

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.errors import ConfigError


def require_packages(config: RunConfig) -> None:
    """Raise ConfigError if ``config`` is of a training that uses a sink whose package is not installed."""
    logging = config.logging
    if config.task != "train":
        return
    if logging.tensorboard:
        _require("spec.run.logging.tensorboard", "true", "tensorboard")
    if uses_wandb(config):
        _require("spec.run.logging.wandb", logging.wandb, "wandb")


def uses_wandb(config: RunConfig) -> bool:
    """Return whether ``config`` sends or writes anything for Weights & Biases."""
    wandb = config.logging.wandb
    return wandb is not None and wandb.mode != "disabled"


def _require(path: str, given: object, package: str) -> None:
    if find_spec(package) is None:
        text = f"needs the package {package}, which is not installed: pip install {package}"
        raise ConfigError(path, given, text)
