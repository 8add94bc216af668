"""The optimizer of a config, and its steps with clipped gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from fluxtrain.contract.run.optim import OptimConfig, OptimizerName
from fluxtrain.optimizers.adafactor import Adafactor
from fluxtrain.optimizers.adamw import AdamW
from fluxtrain.optimizers.adamw_8bit import AdamW8bit
from fluxtrain.optimizers.lion import Lion
from fluxtrain.optimizers.optimizer import Optimizer
from fluxtrain.optimizers.prodigy import Prodigy
from fluxtrain.optimizers.schedule_free import ScheduleFreeAdamW

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
) -> Optimizer:
    """Return the optimizer of all parameters, with its state allocated for loading.

    A ``model`` that is not sharded has the data type ``compute`` afterwards. ``factor_of`` returns the factor
    of the learning rate of a parameter by its name. Weights in bfloat16 are rounded by ``seed``.
    """
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    make = OPTIMIZERS[config.name]
    factors = [factor_of(name) for name in trained]
    return make(list(trained.values()), config, compute, factors, list(trained), seed)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set the learning rate of all parameter groups."""
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
