"""The optimizer and the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fluxtrain.contract.run.config import OptimConfig, ScheduleConfig

STATE = {"adamw": ("exp_avg", "exp_avg_sq")}
"""Each optimizer's state of a parameter, of the parameter's shape: in memory and in checkpoints."""
_STEPS = "step"
"""Torch's name of the number of steps, which RunState has."""


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Return the optimizer of all parameters, in one group, with its state allocated for loading."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )
    for parameter in parameters:
        optimizer.state[parameter] = {
            _STEPS: torch.zeros((), dtype=torch.float32, device=parameter.device),
            **{moment: torch.zeros_like(parameter) for moment in STATE[config.name]},
        }
    return optimizer


def saved_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return the state of ``parameter`` that checkpoints hold, by name: all but the number of steps."""
    state = optimizer.state[parameter].items()
    return {name: tensor for name, tensor in state if name != _STEPS}


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = value


def set_steps_taken(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Set the number of steps that AdamW's bias correction needs, after loading a checkpoint."""
    for state in optimizer.state.values():
        state[_STEPS].fill_(float(steps))


def learning_rate(step: int, optim: OptimConfig, schedule: ScheduleConfig) -> float:
    """Return the learning rate of ``step`` (counted from 1): warm-up, then constant or cosine."""
    if step <= schedule.warmup_steps:
        return optim.learning_rate * step / schedule.warmup_steps
    if schedule.decay == "constant":
        return optim.learning_rate
    decay_steps = max(1, round(schedule.steps * schedule.decay_fraction))
    progress = (step - (schedule.steps - decay_steps)) / decay_steps
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, progress))))
    floor = schedule.min_learning_rate
    return floor + (optim.learning_rate - floor) * cosine


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale the gradients to a global L2 norm of at most ``max_norm``; return the norm before.

    The norm stays on the device (a DTensor if the parameters are sharded): reading it waits.
    """
    return nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)


NEVER = torch.iinfo(torch.int64).max
"""No step, as the result of `first_bad_step`."""


def first_bad_step(before: Tensor, norm: Tensor, step: int) -> Tensor:
    """Return the first step with a gradient norm that is not finite, or NEVER; on the device.

    ``before`` is the result for the previous steps, ``norm`` the gradient norm of ``step``.
    """
    return torch.where(norm.isfinite(), before, before.clamp(max=step))


def update(optimizer: torch.optim.Optimizer, bad_step: Tensor) -> None:
    """Take an optimizer step if ``bad_step`` is NEVER, else change nothing; decided on the device."""
    vars(optimizer)["found_inf"] = (bad_step != NEVER).float()  # as torch.amp.GradScaler does it
    optimizer.step()
