"""The optimizer of a config, and its steps with clipped gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from fluxtrain.contract.run.optim import Decay, OptimConfig, OptimizerName, ScheduleConfig
from fluxtrain.optim.adafactor import Adafactor
from fluxtrain.optim.adamw import AdamW, AdamW8bit
from fluxtrain.optim.lion import Lion
from fluxtrain.optim.optimizer import Optimizer
from fluxtrain.optim.prodigy import Prodigy
from fluxtrain.optim.schedule_free import ScheduleFreeAdamW
from fluxtrain.parallel.parallelize import WeightScaling

OPTIMIZERS: Mapping[OptimizerName, type[Optimizer]] = {
    "adamw": AdamW,
    "adamw_8bit": AdamW8bit,
    "adafactor": Adafactor,
    "lion": Lion,
    "prodigy": Prodigy,
    "schedule_free_adamw": ScheduleFreeAdamW,
}


def make_optimizer(
    model: nn.Module,
    config: OptimConfig,
    compute: torch.dtype = torch.float32,
    factor_of: Callable[[str], float] = lambda name: 1.0,
    seed: int = 0,
    accumulates: bool = True,
    fused: bool = False,
) -> Optimizer:
    """Return the optimizer of all parameters, with its state allocated for loading.

    A ``model`` that is not sharded has the data type ``compute`` afterwards. Its layers in fp8 read the
    largest values of their weights, which the optimizer keeps up to date. ``factor_of`` returns the factor of
    the learning rate of a parameter by its name. Weights in bfloat16 are rounded by ``seed``. A step
    ``accumulates`` the gradients of several micro batches. If ``fused``, AdamW has a kernel of Triton.
    """
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    make = OPTIMIZERS[config.name]
    factors = [factor_of(name) for name in trained]
    parameters, names = list(trained.values()), list(trained)
    optimizer = make(parameters, config, compute, factors, names, seed, accumulates, fused)
    optimizer.scale = WeightScaling(model, compute)
    optimizer.scale()
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value


NEVER = torch.iinfo(torch.int64).max
"""No step, as the result of `first_bad_step`."""
_EPSILON = 1e-6
"""Added to the norm, as in torch's clip_grad_norm_."""


def first_bad_step(before: Tensor, norm: Tensor, step: int) -> Tensor:
    """Return the first step with a gradient norm that is not finite, or NEVER; on the device.

    ``before`` is the result for the previous steps, ``norm`` the gradient norm of ``step``.
    """
    return torch.where(norm.isfinite(), before, before.clamp(max=step))


def update(optimizer: Optimizer, norm: Tensor, max_norm: float, bad_step: Tensor) -> None:
    """Take a step with the gradients, of ``norm``, scaled to a norm of at most ``max_norm``.

    Nothing changes unless ``bad_step`` is NEVER, which the device decides.
    """
    scale = ((norm + _EPSILON) / max_norm).clamp(min=1)
    optimizer.step(scale, found_inf=(bad_step != NEVER).float())


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
