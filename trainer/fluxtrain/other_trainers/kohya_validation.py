"""Conversions of kohya's options of the validation: how much is held out, and when its loss is computed."""

from __future__ import annotations

from fluxtrain.other_trainers import common
from fluxtrain.other_trainers.kohya_values import ACCUMULATION, BATCH, SPLIT, steps_of
from fluxtrain.other_trainers.option import Convert, Values
from fluxtrain.other_trainers.reading import InertError, NoCounterpartError, Reading

STEPS = "validate_every_n_steps"
EVERY = "evaluation.every_samples"


def split(reading: Reading, name: str) -> Values:
    """Return the part of the pictures that is held out."""
    part = reading.number(name)
    if not part:
        reading.notes[name] = "none is held out here either"
    return {"data.validation_split": part, "evaluation.at_end": part > 0}


def every_steps(reading: Reading, name: str) -> Values:
    """Return the samples between two evaluations for a number of steps."""
    return {EVERY: _samples(reading, _number(reading, name))}


def every_epochs(reading: Reading, name: str) -> Values:
    """Return the samples between two evaluations for a number of epochs, unless steps are given too."""
    epochs = _number(reading, name)
    if reading.has(STEPS) and reading.number(STEPS):
        raise NoCounterpartError(f"evaluations have one interval: {STEPS}, and one at the end")
    steps = steps_of(epochs, reading)
    if steps is None:
        raise NoCounterpartError(f"{common.EPOCHS}--{EVERY}")
    return {EVERY: _samples(reading, steps)}


def most_batches(reading: Reading, name: str) -> Values:
    """Raise NoCounterpartError: an evaluation is of all pictures that are held out."""
    _number(reading, name)
    raise NoCounterpartError(
        "an evaluation has all pictures that are held out; a smaller validation_split has fewer"
    )


def seed(reading: Reading, name: str) -> Values:
    """Return nothing if it is the seed of the run, which chooses the pictures here."""
    _require_split(reading)
    if reading.has("seed") and reading.value("seed") == reading.value(name):
        reading.notes[name] = "is the seed of the run"
        return {}
    raise NoCounterpartError("the seed of the run chooses the pictures, and their noise")


def _require_split(reading: Reading) -> None:
    if not reading.has(SPLIT) or not reading.number(SPLIT):
        raise InertError(f"only {SPLIT} uses it")


def _number(reading: Reading, name: str) -> int:
    """Return the value of ``name``, which is used beside a split; tools write 0 for none."""
    _require_split(reading)
    number = reading.whole(name)
    if not number:
        raise InertError("0 asks for none")
    return number


def _samples(reading: Reading, steps: int) -> object:
    found = _BATCH(reading, BATCH)["schedule.global_batch_size"]
    assert isinstance(found, int), "a conversion of whole numbers"
    return steps * found


_BATCH: Convert = common.batch(BATCH, ACCUMULATION)
