"""The learning rate of each step: linear warm-up, then one of the schedules that trainers agree on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from fluxtrain.contract.run.optim import OptimConfig
from fluxtrain.contract.run.schedule import Decay, ScheduleConfig


def learning_rate(step: int, optim: OptimConfig, schedule: ScheduleConfig) -> float:
    """Return the learning rate of ``step``, counted from 1: warm-up, constant, decay."""
    if step <= schedule.warmup_steps:
        return optim.learning_rate * step / schedule.warmup_steps
    remaining = _SHAPES[schedule.decay](_progress(step, schedule), schedule)
    floor = schedule.min_learning_rate if schedule.decay != "constant" else 0.0
    return floor + (optim.learning_rate - floor) * remaining


def _progress(step: int, schedule: ScheduleConfig) -> float:
    """Return the part of the decay that is over at ``step``, 0 to 1."""
    longest = schedule.steps - schedule.warmup_steps
    decay_steps = max(1, min(longest, round(schedule.steps * schedule.decay_fraction)))
    progress = (step - (schedule.steps - decay_steps)) / decay_steps
    return min(1.0, max(0.0, progress))


def _cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


def _restarting(progress: float, schedule: ScheduleConfig) -> float:
    """Return a cosine for each of the cycles; the last one ends at 0."""
    return _cosine(schedule.cycles * progress % 1.0) if progress < 1 else 0.0


_SHAPES: Mapping[Decay, Callable[[float, ScheduleConfig], float]] = {
    "constant": lambda progress, schedule: 1.0,
    "linear": lambda progress, schedule: 1 - progress,
    "cosine": lambda progress, schedule: _cosine(progress),
    "cosine_with_restarts": _restarting,
    "polynomial": lambda progress, schedule: (1 - progress) ** schedule.power,
}
"""What remains of the decay, 1 to 0, by the part that is over."""
