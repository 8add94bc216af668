"""What MLPerf's closed division prescribes; it is that of the presets ``mlperf-*``, which refuse the rest.

``division: auto`` takes part if it can: the run is open as soon as a rule is broken, and says which.

Source: MLCommons' training rules and the ``flux1`` files of rulesets 5.1.0 to 6.1.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from fluxtrain.contract.model_base import join_errors
from fluxtrain.contract.run.config import RunConfig, value_at
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.contract.run.optim import FlowConfig, OptimConfig
from fluxtrain.contract.run.presets import (
    FLOAT32_EPS,
    MLPERF_EVALUATION_SAMPLES,
    MLPERF_TARGET_LOSS,
    MLPERF_TRAINING_SET,
    MLPERF_VALIDATION_SET,
)
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
        return f"{self.text} (training rules {self.section})"


def claims_closed(config: RunConfig) -> bool:
    """Return whether the MLPerf log of ``config`` must be of the closed division, with any preset."""
    return config.logging.mlperf.division == "closed"


def is_benchmark(config: RunConfig) -> bool:
    """Return whether ``config`` is a run of MLPerf's benchmark, in either division."""
    return config.preset.startswith(PREFIX) and config.task == "train"


def is_closed(config: RunConfig) -> bool:
    """Return whether ``config`` is a benchmark run that must be of the closed division."""
    return is_benchmark(config) and claims_closed(config)


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
        Violation(
            section_of(path), f"{path} is {_text(given)}; allowed: {_allowed(path, 'any other')}"
        )
        for path, given in _not_allowed(config).items()
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


def refusal(path: str) -> str:
    """Return what a closed run may have, or may not, at ``path``, and how to leave the closed division."""
    rule = f"(training rules {section_of(path)}); {TO_LEAVE} for"
    if path in FIXED_VALUES:
        return f"the closed division allows only {_allowed(path)} {rule} others"
    return f"the closed division does not allow {FORBIDDEN_VALUES[path]} {rule} it"


def require_allowed(config: RunConfig) -> None:
    """Raise ConfigError naming all fields of a closed run with forbidden values."""
    if claims_closed(config) and not config.preset.startswith(PREFIX):
        raise ConfigError("spec.run.logging.mlperf.division", "closed", ONLY_OF_PRESETS)
    if not is_closed(config):
        return
    if given := _not_allowed(config):
        raise join_errors(
            ConfigError(f"spec.run.{path}", value, refusal(path)) for path, value in given.items()
        )


def require_whole_sets(config: RunConfig, num_train: int, num_validation: int) -> None:
    """Raise DataError if a closed run has other data sets than the benchmark's."""
    if is_closed(config) and (wrong := wrong_sets(num_train, num_validation)):
        found = "; ".join(f"spec.run.{each}" for each in wrong)
        raise DataError(f"no run of the closed division: {found}; {TO_LEAVE}")


def _not_allowed(config: RunConfig) -> dict[str, object]:
    """Return the values of ``config`` that the closed division does not allow, by field."""
    get = {path: attrgetter(path)(config) for path in (*FIXED_VALUES, *FORBIDDEN_VALUES)}
    changed = {path: get[path] for path, allowed in FIXED_VALUES.items() if get[path] != allowed}
    return changed | {path: value for path, value in FORBIDDEN_VALUES.items() if get[path] == value}


def _allowed(path: str, other: str = "") -> str:
    """Return the only value that is allowed at ``path``, ``other`` if there are several."""
    return _text(FIXED_VALUES.get(path, other))


def _text(value: object) -> str:
    return "null" if value is None else str(value)


@dataclass(frozen=True)
class Deviation:
    """Where a run computes otherwise than MLPerf's reference: what it is about, what both do, and why.

    The one source of a submission's statement: differences of fluxtrain's design, which hold for every run or
    follow from a field, and fields that the reference fixes and the run changes.
    """

    topic: str
    reference: str
    run: str
    reason: str | None
    """None if only the submitter knows it."""
    applies: Callable[[RunConfig], bool] = field(default=lambda config: True, compare=False)
    """Returns whether a run has a difference of `DESIGN`."""


DESIGN: tuple[Deviation, ...] = (
    Deviation(
        "RoPE angles",
        "float32, rounded to bfloat16 on entry to each FSDP unit",
        "float64 frequencies, float32 cosines and sines, never rounded",
        "as in BFL's code and diffusers: positions that are exact in float32 stay exact",
    ),
    Deviation(
        "noise, timesteps and latents of training",
        "a sequential generator per rank, seeded by rank, not in checkpoints",
        "a function of seed, global batch and position in it",
        "any number of ranks, and a resumed run, draws the same numbers; the distributions are equal",
    ),
    Deviation(
        "prompt dropout",
        "Python's random generator, which is never seeded",
        "the same function of seed, global batch and position; equal probability, one draw for both",
        "the reference's dropout cannot be repeated from its seed",
    ),
    Deviation(
        "noise of evaluations",
        "drawn from the generator of training, which an evaluation so changes",
        "a stream of its own, equal in every evaluation",
        "evaluations can be compared with each other, and do not change the training",
    ),
    Deviation(
        "sum of evaluation losses",
        "float32 on the device",
        "float64",
        "29,696 terms, and the decision to stop depends on the third digit",
    ),
    Deviation(
        "division of the sequence of samples",
        "each rank reads a contiguous part of the data set, its last sample twice in each epoch",
        "the data set's order; ranks divide each global batch; each sample is read once in an epoch",
        "a run is the same on any number of ranks; the second reading is a fault of the reference",
        lambda config: config.data.order == "sequential",
    ),
    Deviation(
        "unreadable validation images",
        "left out while the set is prepared",
        "an error",
        "an evaluation is over all 29,696 samples",
        lambda config: config.data.source == "images",
    ),
    Deviation(
        "tokenizers",
        "transformers' slow ones",
        "transformers' fast ones",
        "the slow ones are not in transformers 5; ids differ for runs of one letter (T5), control "
        "characters (both), Chinese, Indic and Arabic characters and joined emoji (CLIP, without ftfy)",
        lambda config: config.data.source == "images" and config.encoders.text == "t5-clip",
    ),
    Deviation(
        "compilation",
        "torch.compile of the whole model as an option, off by default",
        "torch.compile of each block, where the node has the compiler",
        "speed; the order of operations inside a kernel differs, the mathematics does not",
        lambda config: config.parallel.compile is not False,
    ),
    Deviation(
        "data type of forward and backward passes",
        "bfloat16",
        "float32",
        "exact comparisons, and processors without bfloat16",
        lambda config: config.precision.compute != "bfloat16",
    ),
    Deviation(
        "data type of the gradients' sum over ranks",
        "float32",
        "bfloat16; the sum over micro batches is float32",
        "half of what the nodes send; the format is one that MLPerf allows, and it is in the log",
        lambda config: config.precision.reduce != "float32",
    ),
    Deviation(
        "linear layers of the blocks",
        "bfloat16",
        "fp8 with dynamic scales, but for the modulations",
        "speed; the format is one that MLPerf allows, and it is in the log",
        lambda config: config.precision.fp8 != "none",
    ),
)
"""Where fluxtrain's design differs from the reference."""

ACCUMULATION = Deviation(
    "gradient accumulation",
    "none: the global batch is the ranks' batches",
    "the global batch is divided into micro batches, whose gradients are added up in float32",
    "global batches do not depend on the memory and the number of GPUs",
)
"""Of runs whose log has more than one gradient_accumulation_steps."""

_REASONS: Mapping[str, str] = {
    "model.qk_norm_eps": "the constant of BFL's and diffusers' models, whose weights can be loaded",
    "data.order": "another order in each epoch",
    "flow.reference_rounding": "float32 latents, noise, timesteps and targets: rounding leaves 128 timesteps "
    "between 0.5 and 1, and some become exactly 1",
}
"""Reasons for values that are not the reference's, but the default of presets other than the benchmark's."""


def deviations(config: RunConfig, reasons: Mapping[str, str]) -> Iterator[Deviation]:
    """Yield how ``config`` differs from the reference.

    ``reasons`` has the submitter's reason for changed fields, by field, or by section for all of its fields.
    """
    yield from (each for each in DESIGN if each.applies(config))
    for path, given in _not_allowed(config).items():
        told = next((reasons[name] for name in _names(path) if name in reasons), None)
        reference = _allowed(path, f"not {_text(given)}")
        yield Deviation(path, reference, _text(given), told or _REASONS.get(path))


def unused_reasons(config: RunConfig, reasons: Mapping[str, str]) -> list[str]:
    """Return the fields and sections in ``reasons`` of which ``config`` changes nothing."""
    changed = {each.topic for each in deviations(config, {})}
    return [name for name in reasons if not any(name in _names(topic) for topic in changed)]


def _names(path: str) -> list[str]:
    """Return the field ``path`` and the sections that hold it, the smallest first."""
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


SIZE = "schedule.global_batch_size"
FIELDS = ("optim.learning_rate", "schedule.warmup_steps")
"""Fields that a closed run has to give at other batch sizes."""


@dataclass(frozen=True)
class ReferenceSchedule:
    """Learning rate and warm-up of the reference runs at one global batch size."""

    learning_rate: float
    warmup_steps: int

    def __str__(self) -> str:
        return f"learning rate {self.learning_rate} after {self.warmup_steps} warm-up steps"


REFERENCE_SCHEDULES: Mapping[int, ReferenceSchedule] = {
    512: ReferenceSchedule(2e-4, 1600),
    1024: ReferenceSchedule(2.5e-4, 800),
    2048: ReferenceSchedule(2.5e-4, 0),
    4096: ReferenceSchedule(4e-4, 100),
}
"""By global batch size: learning rates and warm-ups of MLCommons' reference runs, and of the presets
``mlperf-*``, from the reference convergence points of ``flux1`` in rulesets 6.0.0 and 6.1.0."""
MESSAGE = (
    f"must be one of {', '.join(map(str, REFERENCE_SCHEDULES))}, for which the reference has a learning "
    f"rate, or {' and '.join(FIELDS)} must be given"
)


def schedule_values(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the reference's fields for the batch size of ``run``; none for other presets and sizes."""
    size = value_at(run, SIZE)
    is_known = isinstance(size, int | float) and size in REFERENCE_SCHEDULES
    if not is_known or not str(run.get("preset")).startswith(PREFIX):
        return {}
    schedule = REFERENCE_SCHEDULES[size]
    return {
        "optim": {"learning_rate": schedule.learning_rate},
        "schedule": {"warmup_steps": schedule.warmup_steps},
    }


def require_schedule(run: Mapping[str, Any], config: RunConfig) -> None:
    """Raise ConfigError if closed ``run`` has a batch size without a reference, and no own schedule."""
    size = config.schedule.global_batch_size
    if not is_closed(config) or size in REFERENCE_SCHEDULES:
        return
    if any(value_at(run, field) is None for field in FIELDS):
        raise ConfigError(f"spec.run.{SIZE}", size, MESSAGE)
