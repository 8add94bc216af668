"""ScheduleConfig: length, batch size and learning rate schedule."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fluxtrain.contract.strict_model import (
    IMMUTABLE,
    Count,
    Fraction,
    Positive,
    Rule,
    StrictModel,
)

Decay = Literal["constant", "linear", "cosine", "cosine_with_restarts", "polynomial"]


def _only_of(field: str, neutral: float, decay: Decay) -> Rule:
    """Return the rule that ``field`` is ``neutral`` unless the schedule is ``decay``."""
    return Rule(
        field,
        f"must be {neutral} unless decay is {decay}: other schedules do not use it",
        lambda schedule: getattr(schedule, field) == neutral or schedule.decay == decay,
        f"self.{field} == {neutral} || self.decay == '{decay}'",
        others=("decay",),
    )


class ScheduleConfig(StrictModel):
    """Length of the training, batch size and learning rate schedule."""

    rules: ClassVar = (
        _only_of("cycles", 1, "cosine_with_restarts"),
        _only_of("power", 1.0, "polynomial"),
    )

    steps: Positive = 30_000
    """Maximum number of optimizer steps."""
    epochs: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Passes over the training samples, which give the number of steps instead of ``steps``, rounded up, when
    the data are opened; null: ``steps``."""
    global_batch_size: Annotated[Positive, IMMUTABLE] = 512
    """Samples per optimizer step, over all ranks and accumulation steps."""
    warmup_steps: Annotated[Count, IMMUTABLE] = 0
    """Steps of linear warm-up, with learning rate learning_rate x step / warmup_steps; of the presets
    ``mlperf-*``, as learning_rate."""
    decay: Annotated[Decay, IMMUTABLE] = "constant"
    """Learning rate schedule after the warm-up: kohya's and diffusers' of the same names."""
    decay_fraction: Annotated[Fraction, IMMUTABLE] = 1.0
    """Fraction of the steps, at the end, over which the learning rate decays; constant before. It begins
    after the warm-up at the earliest."""
    min_learning_rate: Annotated[float, Field(ge=0, le=10), IMMUTABLE] = 0.0
    """Final learning rate of every decay."""
    cycles: Annotated[Annotated[int, Field(ge=1, le=1000)], IMMUTABLE] = 1
    """Half periods of ``cosine_with_restarts``, each of which begins at the full learning rate."""
    power: Annotated[Annotated[float, Field(gt=0, le=100)], IMMUTABLE] = 1.0
    """Exponent of ``polynomial``: what remains of the decay, to this power."""
