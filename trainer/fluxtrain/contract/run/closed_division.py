"""What MLPerf's closed division prescribes; it is that of the presets ``mlperf-*``, which refuse the rest.

``division: auto`` takes part if it can: the run is open as soon as a rule is broken, and says which.

Source: MLCommons' training rules and the ``flux1`` files of rulesets 5.1.0 to 6.1.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.flow import FlowConfig
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.contract.run.optim import OptimConfig
from fluxtrain.contract.run.presets import (
    FLOAT32_EPS,
    MLPERF_EVALUATION_SAMPLES,
    MLPERF_TARGET_LOSS,
    MLPERF_TRAINING_SET,
    MLPERF_VALIDATION_SET,
)
from fluxtrain.contract.validation import join_errors
from fluxtrain.errors import ConfigError, DataError

PREFIX = "mlperf-"
"""Prefix of the presets for benchmark runs."""

FIXED_VALUES: Mapping[str, object] = {
    "adapter": None,
    "initial_weights": None,
    "data.image_size": 256,
    "data.latent_size": 32,
    "data.buckets": None,
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
        for name, value in OptimConfig().model_dump(exclude={"learning_rate", "prodigy"}).items()
    },
    "flow.reference_rounding": True,
    "model.qk_norm_eps": FLOAT32_EPS,
    "precision.weights": "float32",
    "schedule.decay": "constant",
    "schedule.epochs": None,
    "evaluation.every_samples": MLPERF_EVALUATION_SAMPLES,
    "evaluation.target_loss": MLPERF_TARGET_LOSS,
    "evaluation.at_start": False,
    "evaluation.at_end": False,
}
"""Fields of ``spec.run`` with the only value that the closed division allows."""


FORBIDDEN_VALUES: Mapping[str, object] = {
    "data.source": "synthetic",
    "seed": RunConfig.model_fields["seed"].default,
}
"""Fields of ``spec.run`` with a value that the closed division does not allow."""
SECTIONS: Mapping[str, str] = {
    "adapter": "8.1",
    "data": "6.3",
    "data.max_bad_fraction": "6.6",
    "data.order": "6.6",
    "data.source": "6.1",
    "encoders": "6.2",
    "evaluation": "9.4",
    "flow": "9.1",
    "initial_weights": "8.2",
    "model": "8.1",
    "optim": "9.1",
    "precision.weights": "9.1",
    "schedule": "9.1",
    "seed": "5.1",
}
"""Sections of the training rules for fields, or all fields of a part, of ``spec.run``."""
WHOLE_SETS = "6.5"
"""Section on the training and the validation set."""
EVERY_SAMPLE = "6.6"
"""Section on the order of the training data, in which each sample comes once."""
WHOLE_EVALUATION = "9.4"
"""Section on the evaluation, which is as thorough as the reference's."""
SAME_SYSTEM = "2.2"
"""Section on the system, which stays the same."""
ONLY_OF_PRESETS = f"must be open: the closed one is that of the presets {PREFIX}*"
TO_LEAVE = "set logging.mlperf.division to open"


@dataclass(frozen=True)
class Violation:
    """A rule of the closed division that a run breaks: its section, and what is wrong."""

    section: str
    text: str

    def __str__(self) -> str:
        """Return both, in words."""
        return f"{self.text} (training rules {self.section})"


def claims_closed(config: RunConfig) -> bool:
    """Return whether the MLPerf log of ``config`` must be of the closed division, with any preset."""
    return config.logging.mlperf.division == "closed"


def is_closed(config: RunConfig) -> bool:
    """Return whether ``config`` is a benchmark run that must be of the closed division."""
    is_benchmark = config.preset.startswith(PREFIX) and config.task == "train"
    return is_benchmark and claims_closed(config)


def begins_closed(config: RunConfig, num_nodes: tuple[int, int] = (1, 1)) -> bool:
    """Return whether the MLPerf log of ``config`` begins in the closed division.

    ``num_nodes`` are the fewest and the most nodes of the run.
    """
    if config.logging.mlperf.division == "auto":
        return not violations(config, num_nodes)
    return claims_closed(config)


def violations(config: RunConfig, num_nodes: tuple[int, int] = (1, 1)) -> list[Violation]:
    """Return the rules of the closed division that ``config`` breaks, as far as it tells."""
    found = [
        Violation(section_of(path), f"{path} is {_shown(given)}; {allowed}")
        for path, given, allowed in _forbidden(config)
    ]
    if not config.preset.startswith(PREFIX):
        found.insert(0, Violation("8", f"the preset {config.preset} is not the benchmark"))
    if num_nodes[0] < num_nodes[1]:
        text = f"the run may have {num_nodes[0]} to {num_nodes[1]} nodes; allowed: a fixed number"
        found.append(Violation(SAME_SYSTEM, text))
    return found


def wrong_sets(num_train: int, num_validation: int) -> list[Violation]:
    """Return the rules that data sets of these sizes break."""
    found = {
        "train": (num_train, MLPERF_TRAINING_SET),
        "validation": (num_validation, MLPERF_VALIDATION_SET),
    }
    return [
        Violation(WHOLE_SETS, f"data.{name} has {given} samples; allowed: {needed}")
        for name, (given, needed) in found.items()
        if given != needed
    ]


def section_of(path: str) -> str:
    """Return the section of the training rules for the field ``path`` of ``spec.run``."""
    return SECTIONS.get(path) or SECTIONS[path.partition(".")[0]]


def message(path: str, allowed: object) -> str:
    """Return the allowed value of a closed run, and how to leave the closed division."""
    rule = f"(training rules {section_of(path)})"
    return f"the closed division allows only {_shown(allowed)} {rule}; {TO_LEAVE} for others"


def forbidden_message(path: str, value: object) -> str:
    """Return that a closed run may not have ``value``, and how to leave the closed division."""
    rule = f"(training rules {section_of(path)})"
    return f"the closed division does not allow {value} {rule}; {TO_LEAVE} for it"


def require_allowed(config: RunConfig, at: str) -> None:
    """Raise ConfigError naming all fields of a closed run, below ``at``, with forbidden values."""
    if claims_closed(config) and not config.preset.startswith(PREFIX):
        raise ConfigError(f"{at}.logging.mlperf.division", "closed", ONLY_OF_PRESETS)
    if not is_closed(config):
        return
    get = {path: attrgetter(path)(config) for path in (*FIXED_VALUES, *FORBIDDEN_VALUES)}
    wrong = [
        ConfigError(f"{at}.{path}", get[path], message(path, allowed))
        for path, allowed in FIXED_VALUES.items()
        if get[path] != allowed
    ]
    wrong += [
        ConfigError(f"{at}.{path}", value, forbidden_message(path, value))
        for path, value in FORBIDDEN_VALUES.items()
        if get[path] == value
    ]
    if wrong:
        raise join_errors(wrong)


def require_whole_sets(config: RunConfig, num_train: int, num_validation: int) -> None:
    """Raise DataError if a closed run has other data sets than the benchmark's."""
    if is_closed(config) and (wrong := wrong_sets(num_train, num_validation)):
        found = "; ".join(f"spec.run.{each}" for each in wrong)
        raise DataError(f"no run of the closed division: {found}; {TO_LEAVE}")


def _forbidden(config: RunConfig) -> Iterator[tuple[str, object, str]]:
    for path, allowed in FIXED_VALUES.items():
        if (given := attrgetter(path)(config)) != allowed:
            yield path, given, f"allowed: {_shown(allowed)}"
    for path, value in FORBIDDEN_VALUES.items():
        if attrgetter(path)(config) == value:
            yield path, value, "allowed: any other"


def _shown(value: object) -> object:
    return "null" if value is None else value
