"""Where a configuration computes otherwise than MLPerf's reference, with the reason of each difference.

The one source of a submission's statement. Two kinds of differences: those of fluxtrain's own design, which
hold for every run or follow from a field, and fields that the reference fixes and the run changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter

from fluxtrain.contract.run.closed_division import FIXED_VALUES, FORBIDDEN_VALUES
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.optim import ProdigyConfig


@dataclass(frozen=True)
class Deviation:
    """One difference: what it is about, what the reference does, what the run did, and why."""

    topic: str
    reference: str
    run: str
    reason: str | None
    """None if only the submitter knows it."""


@dataclass(frozen=True)
class _Design:
    """A difference of fluxtrain's design, of the runs to which it ``applies``."""

    deviation: Deviation
    applies: Callable[[RunConfig], bool] = lambda config: True


DESIGN: tuple[_Design, ...] = (
    _Design(
        Deviation(
            "RoPE angles",
            "float32, rounded to bfloat16 on entry to each FSDP unit",
            "float64 frequencies, float32 cosines and sines, never rounded",
            "as in BFL's code and diffusers: positions that are exact in float32 stay exact",
        )
    ),
    _Design(
        Deviation(
            "noise, timesteps and latents of training",
            "a sequential generator per rank, seeded by rank, not in checkpoints",
            "a function of seed, global batch and position in it",
            "any number of ranks, and a resumed run, draws the same numbers; the distributions are equal",
        )
    ),
    _Design(
        Deviation(
            "prompt dropout",
            "Python's random generator, which is never seeded",
            "the same function of seed, global batch and position; equal probability, one draw for both",
            "the reference's dropout cannot be repeated from its seed",
        )
    ),
    _Design(
        Deviation(
            "noise of evaluations",
            "drawn from the generator of training, which an evaluation so changes",
            "a stream of its own, equal in every evaluation",
            "evaluations can be compared with each other, and do not change the training",
        )
    ),
    _Design(
        Deviation(
            "sum of evaluation losses",
            "float32 on the device",
            "float64",
            "29,696 terms, and the decision to stop depends on the third digit",
        )
    ),
    _Design(
        Deviation(
            "division of the sequence of samples",
            "each rank reads a contiguous part of the data set, its last sample twice in each epoch",
            "the data set's order; ranks divide each global batch; each sample is read once in an epoch",
            "a run is the same on any number of ranks; the second reading is a fault of the reference",
        ),
        lambda config: config.data.order == "sequential",
    ),
    _Design(
        Deviation(
            "unreadable validation images",
            "left out while the set is prepared",
            "an error",
            "an evaluation is over all 29,696 samples",
        ),
        lambda config: config.data.source == "images",
    ),
    _Design(
        Deviation(
            "tokenizers",
            "transformers' slow ones",
            "transformers' fast ones",
            "the slow ones are not in transformers 5; ids differ for runs of one letter (T5), control "
            "characters (both), Chinese, Indic and Arabic characters and joined emoji (CLIP, without ftfy)",
        ),
        lambda config: config.data.source == "images" and config.encoders.text == "t5-clip",
    ),
    _Design(
        Deviation(
            "compilation",
            "torch.compile of the whole model as an option, off by default",
            "torch.compile of each block, where the node has the compiler",
            "speed; the order of operations inside a kernel differs, the mathematics does not",
        ),
        lambda config: config.parallel.compile is not False,
    ),
    _Design(
        Deviation(
            "data type of forward and backward passes",
            "bfloat16",
            "float32",
            "exact comparisons, and processors without bfloat16",
        ),
        lambda config: config.precision.compute != "bfloat16",
    ),
    _Design(
        Deviation(
            "data type of the gradients' sum over ranks",
            "float32",
            "bfloat16; the sum over micro batches is float32",
            "half of what the nodes send; the format is one that MLPerf allows, and it is in the log",
        ),
        lambda config: config.precision.reduce != "float32",
    ),
    _Design(
        Deviation(
            "linear layers of the blocks",
            "bfloat16",
            "fp8 with dynamic scales, but for the modulations",
            "speed; the format is one that MLPerf allows, and it is in the log",
        ),
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

FREE_FIELDS = (
    *("optim.learning_rate", "schedule.global_batch_size", "schedule.warmup_steps"),
    "schedule.steps",
)
"""Fields that the rules leave to the submitter, so that no value of them is a deviation."""
_IMPLIED_FIELDS = (
    *(f"schedule.{name}" for name in ("decay_fraction", "min_learning_rate", "cycles", "power")),
    *(f"optim.prodigy.{name}" for name in ProdigyConfig.model_fields),
)
"""Without effect while ``schedule.decay`` is constant and ``optim.name`` adamw, which are fixed."""
DESIGN_FIELDS = ("precision.compute", "precision.reduce", "precision.fp8")
"""Fields that DESIGN looks at."""
KNOWN_FIELDS = {*FIXED_VALUES, *FREE_FIELDS, *_IMPLIED_FIELDS, *DESIGN_FIELDS}
"""Fields of which it is known whether, and how, they deviate from the reference."""

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
    for design in DESIGN:
        if design.applies(config):
            yield design.deviation
    for field, prescribed in FIXED_VALUES.items():
        given = attrgetter(field)(config)
        if given != prescribed:
            yield _changed(field, _text(prescribed), _text(given), reasons)
    for field, other in FORBIDDEN_VALUES.items():
        given = attrgetter(field)(config)
        if given == other:
            yield _changed(field, f"not {_text(other)}", _text(given), reasons)


def unused_reasons(config: RunConfig, reasons: Mapping[str, str]) -> list[str]:
    """Return the fields and sections in ``reasons`` of which ``config`` changes nothing."""
    changed = {each.topic for each in deviations(config, {})}
    return [name for name in reasons if not any(name in _names(topic) for topic in changed)]


def _changed(field: str, prescribed: str, given: str, reasons: Mapping[str, str]) -> Deviation:
    told = next((reasons[name] for name in _names(field) if name in reasons), None)
    return Deviation(field, prescribed, given, told or _REASONS.get(field))


def _names(field: str) -> list[str]:
    """Return ``field`` and the sections that hold it, the smallest first."""
    parts = field.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def _text(value: object) -> str:
    return "null" if value is None else str(value)
