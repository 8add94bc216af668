"""Values that MLPerf's closed division prescribes; the presets ``mlperf-*`` refuse others unless open.

Source: MLCommons' training rules and the ``flux1`` files of rulesets 5.1.0 to 6.1.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

from fluxtrain.contract.run.config import FlowConfig, OptimConfig, RunConfig
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.contract.run.presets import MLPERF_EVALUATION_SAMPLES, MLPERF_TARGET_LOSS
from fluxtrain.contract.validation import join_errors
from fluxtrain.errors import ConfigError

PREFIX = "mlperf-"
"""Prefix of the presets for benchmark runs."""

FIXED_VALUES: Mapping[str, object] = {
    "adapter": None,
    "initial_weights": None,
    "data.image_size": 256,
    "data.latent_size": 32,
    "data.text_length": 256,
    "encoders.text": "t5-clip",
    "encoders.autoencoder_kind": "flux",
    "encoders.latent_shift": 0.1159,
    "encoders.latent_scale": 0.3611,
    **{f"flow.{name}": value for name, value in FlowConfig().model_dump().items()},
    **{f"model.{name}": value for name, value in ModelConfig().model_dump().items()},
    **{
        f"optim.{name}": value
        for name, value in OptimConfig().model_dump(exclude={"learning_rate"}).items()
    },
    "schedule.decay": "constant",
    "evaluation.every_samples": MLPERF_EVALUATION_SAMPLES,
    "evaluation.target_loss": MLPERF_TARGET_LOSS,
}
"""Fields of ``spec.run`` with the only value that the closed division allows."""


def claims_closed(config: RunConfig) -> bool:
    """Return whether the MLPerf log of ``config`` states the closed division, with any preset."""
    return config.logging.mlperf.division == "closed"


def is_closed(config: RunConfig) -> bool:
    """Return whether ``config`` is a benchmark run in the closed division."""
    is_benchmark = config.preset.startswith(PREFIX) and config.task == "train"
    return is_benchmark and claims_closed(config)


def message(allowed: object) -> str:
    """Return the allowed value of a closed run, and how to leave the closed division."""
    value = "null" if allowed is None else allowed
    return (
        f"the closed division allows only {value}; set logging.mlperf.division to open for others"
    )


def require_allowed(config: RunConfig, at: str) -> None:
    """Raise ConfigError naming all fields of a closed run, below ``at``, with forbidden values."""
    wrong = [
        ConfigError(f"{at}.{path}", given, message(allowed))
        for path, allowed in FIXED_VALUES.items()
        if (given := attrgetter(path)(config)) != allowed
    ]
    if wrong and is_closed(config):
        raise join_errors(wrong)
