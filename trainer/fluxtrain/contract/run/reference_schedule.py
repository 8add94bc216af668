"""Learning rates and warm-ups of MLCommons' reference runs by batch size: those of the presets ``mlperf-*``.

Source: the reference convergence points of ``flux1`` in rulesets 6.0.0 and 6.1.0 of ``mlperf-logging``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fluxtrain.contract.run.closed_division import PREFIX, is_closed
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.immutable_fields import value_at
from fluxtrain.errors import ConfigError

SIZE = "schedule.global_batch_size"
FIELDS = ("optim.learning_rate", "schedule.warmup_steps")
"""Fields that a closed run has to give at other batch sizes."""


@dataclass(frozen=True)
class ReferenceSchedule:
    """Learning rate and warm-up of the reference runs at one global batch size."""

    learning_rate: float
    warmup_steps: int

    def __str__(self) -> str:
        """Return both, in words."""
        return f"learning rate {self.learning_rate} after {self.warmup_steps} warm-up steps"


REFERENCE_SCHEDULES: Mapping[int, ReferenceSchedule] = {
    512: ReferenceSchedule(2e-4, 1600),
    1024: ReferenceSchedule(2.5e-4, 800),
    2048: ReferenceSchedule(2.5e-4, 0),
    4096: ReferenceSchedule(4e-4, 100),
}
"""The schedules by global batch size."""
MESSAGE = (
    f"must be one of {', '.join(map(str, REFERENCE_SCHEDULES))}, for which the reference has a learning "
    f"rate, or {' and '.join(FIELDS)} must be given"
)


def schedule_values(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the reference's fields for the batch size of ``run``; none for other presets and sizes."""
    size = value_at(run, SIZE)
    if not str(run.get("preset")).startswith(PREFIX) or not isinstance(size, int | float):
        return {}
    schedule = REFERENCE_SCHEDULES.get(int(size)) if size in REFERENCE_SCHEDULES else None
    if schedule is None:
        return {}
    return {
        "optim": {"learning_rate": schedule.learning_rate},
        "schedule": {"warmup_steps": schedule.warmup_steps},
    }


def require_schedule(run: Mapping[str, Any], config: RunConfig, at: str) -> None:
    """Raise ConfigError if closed ``run`` has a batch size without a reference, and no own schedule."""
    size = config.schedule.global_batch_size
    if not is_closed(config) or size in REFERENCE_SCHEDULES:
        return
    if any(value_at(run, field) is None for field in FIELDS):
        raise ConfigError(f"{at}.{SIZE}", size, MESSAGE)
