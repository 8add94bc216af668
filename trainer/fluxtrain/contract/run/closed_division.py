"""What MLPerf's closed division prescribes; it is that of the presets ``mlperf-*``, which refuse the rest.

Source: MLCommons' training rules and the ``flux1`` files of rulesets 5.1.0 to 6.1.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

from fluxtrain.contract.run.config import FlowConfig, OptimConfig, RunConfig
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.contract.run.presets import (
    FLOAT32_EPS,
    MLPERF_EVALUATION_SAMPLES,
    MLPERF_TARGET_LOSS,
    MLPERF_TRAINING_SET,
    MLPERF_VALIDATION_SET,
)
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
    "data.order": "sequential",
    "data.max_bad_fraction": 0.0,
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
    "model.qk_norm_eps": FLOAT32_EPS,
    "schedule.decay": "constant",
    "evaluation.every_samples": MLPERF_EVALUATION_SAMPLES,
    "evaluation.target_loss": MLPERF_TARGET_LOSS,
    "evaluation.at_start": False,
    "evaluation.at_end": False,
}
"""Fields of ``spec.run`` with the only value that the closed division allows."""


FORBIDDEN_VALUES: Mapping[str, object] = {
    "data.source": "synthetic",
    "seed": RunConfig.model_fields[
        "seed"
    ].default,  # a constant; seeds come from the system or a clock
}
"""Fields of ``spec.run`` with a value that the closed division does not allow."""
ONLY_OF_PRESETS = f"must be open: the closed one is that of the presets {PREFIX}*"
_TO_LEAVE = "set logging.mlperf.division to open"


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
    return f"the closed division allows only {value}; {_TO_LEAVE} for others"


def forbidden_message(value: object) -> str:
    """Return that a closed run may not have ``value``, and how to leave the closed division."""
    return f"the closed division does not allow {value}; {_TO_LEAVE} for it"


def require_allowed(config: RunConfig, at: str) -> None:
    """Raise ConfigError naming all fields of a closed run, below ``at``, with forbidden values."""
    if claims_closed(config) and not config.preset.startswith(PREFIX):
        raise ConfigError(f"{at}.logging.mlperf.division", "closed", ONLY_OF_PRESETS)
    if not is_closed(config):
        return
    wrong = [
        ConfigError(f"{at}.{path}", given, message(allowed))
        for path, allowed in FIXED_VALUES.items()
        if (given := attrgetter(path)(config)) != allowed
    ]
    wrong += [
        ConfigError(f"{at}.{path}", value, forbidden_message(value))
        for path, value in FORBIDDEN_VALUES.items()
        if attrgetter(path)(config) == value
    ]
    if wrong:
        raise join_errors(wrong)


def require_whole_sets(config: RunConfig, num_train: int, num_validation: int) -> None:
    """Raise ConfigError if a closed run has other data sets than the benchmark's."""
    if not is_closed(config):
        return
    found = {
        "train": (num_train, MLPERF_TRAINING_SET),
        "validation": (num_validation, MLPERF_VALIDATION_SET),
    }
    wrong = [
        ConfigError(
            f"spec.run.data.{name}",
            given,
            f"the closed division needs the benchmark's {needed} samples (training rules 6.5); {_TO_LEAVE}",
        )
        for name, (given, needed) in found.items()
        if given != needed
    ]
    if wrong:
        raise join_errors(wrong)
