"""The optimizer and the learning rate of each step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fluxtrain.contract.run.optim import OptimConfig
from fluxtrain.sharded_tensor import is_sharded, local_part, sum_over_parts

STATE = {"adamw": ("exp_avg", "exp_avg_sq")}
"""Each optimizer's state of a parameter, of the parameter's shape: in memory and in checkpoints."""


class AdamW(torch.optim.Optimizer):
    """Torch's fused AdamW on this rank's parts of sharded parameters, and the norm of their gradients.

    Torch's own dispatches each operator to every DTensor, which costs the host much of a short step.
    ``state`` has the moments of each parameter, sharded as it is.
    """

    def __init__(
        self, parameters: list[nn.Parameter], config: OptimConfig, compute: torch.dtype
    ) -> None:
        """Allocate the state of ``parameters``; those that are not sharded are rounded to ``compute``."""
        super().__init__(parameters, {"lr": config.learning_rate})
        self.weights = {each: _weight(each, compute) for each in parameters}
        """The float32 value of each parameter, sharded as it is: what steps change, and checkpoints hold."""
        self._config, self._parameters = config, parameters
        names = STATE[config.name]
        for parameter in parameters:
            weight = self.weights[parameter]
            self.state[parameter] = {name: torch.zeros_like(weight) for name in names}
        self.steps_taken = torch.zeros((), dtype=torch.float32, device=parameters[0].device)
        """Number of steps until now, for the correction of the moments' bias."""
        self._owned = [each for each in parameters if local_part(each.detach()).numel() > 0]
        self._weights = [local_part(self.weights[parameter]) for parameter in self._owned]
        self._rounded = [each.detach() for each in parameters if each.dtype != torch.float32]
        self._moments = [
            [local_part(self.state[parameter][name]) for parameter in self._owned] for name in names
        ]

    def resume(self, steps: int) -> None:
        """Continue after ``steps`` steps, whose weights and moments were loaded."""
        self.steps_taken.fill_(steps)
        self._round()

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """Return the L2 norm of all gradients, on the device; every rank must call this."""
        squares = torch.zeros_like(self.steps_taken)
        if self._owned:
            squares = torch.stack(torch._foreach_norm(self._gradients())).square().sum()
        return sum_over_parts(squares, self._parameters[0]).sqrt()

    @torch.no_grad()
    def step(self, grad_scale: Tensor, found_inf: Tensor) -> None:  # type: ignore[override]
        """Take a step with all gradients divided by ``grad_scale``; change nothing if ``found_inf`` is 1.

        Both are numbers on the device.
        """
        self.steps_taken += 1 - found_inf
        if not self._owned:
            return
        (group,), config = self.param_groups, self._config
        averages, squares = self._moments
        torch._fused_adamw_(
            self._weights,
            self._gradients(),
            averages,
            squares,
            [],
            [self.steps_taken] * len(self._owned),
            lr=group["lr"],
            beta1=config.beta1,
            beta2=config.beta2,
            weight_decay=config.weight_decay,
            eps=config.epsilon,
            amsgrad=False,
            maximize=False,
            grad_scale=grad_scale,
            found_inf=found_inf,
        )
        self._round()

    def _round(self) -> None:
        """Give the parameters that are not float32 the values of their weights."""
        if self._rounded:
            torch._foreach_copy_(self._rounded, self._weights)

    def _gradients(self) -> list[Tensor]:
        return [_local_gradient(parameter) for parameter in self._owned]


def _weight(parameter: nn.Parameter, compute: torch.dtype) -> Tensor:
    """Round ``parameter`` to ``compute`` unless it is sharded; return its value in float32.

    Gradients are then cast to float32 when they are added up. FSDP2 does both for sharded parameters.
    """
    weight = parameter.detach()
    if not is_sharded(parameter) and compute != weight.dtype:
        parameter.data = weight.to(compute)
        parameter.grad_dtype = weight.dtype
    return weight


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "every parameter takes part in the loss"
    return local_part(parameter.grad)


def make_optimizer(
    model: nn.Module, config: OptimConfig, compute: torch.dtype = torch.float32
) -> AdamW:
    """Return the optimizer of all parameters, with its state allocated for loading.

    A ``model`` that is not sharded has the data type ``compute`` afterwards.
    """
    return AdamW([each for each in model.parameters() if each.requires_grad], config, compute)


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


def update(optimizer: AdamW, norm: Tensor, max_norm: float, bad_step: Tensor) -> None:
    """Take a step with the gradients, of ``norm``, scaled to a norm of at most ``max_norm``.

    Nothing changes unless ``bad_step`` is NEVER, which the device decides.
    """
    scale = ((norm + _EPSILON) / max_norm).clamp(min=1)
    optimizer.step(scale, found_inf=(bad_step != NEVER).float())
