"""AdamW: torch's fused kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from fluxtrain.contract.run.optim import OptimConfig
from fluxtrain.optimizers.optimizer import Optimizer


def step(
    tensors: tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]],
    steps_taken: Tensor,
    config: OptimConfig,
    rate: float,
    grad_scale: Tensor,
    found_inf: Tensor,
) -> None:
    """Take torch's fused step; ``tensors`` are weights, gradients and both moments, changed in place.

    Gradients are divided by ``grad_scale``; nothing changes if ``found_inf`` is not 0.
    """
    torch._fused_adamw_(
        *tensors,
        [],
        [steps_taken] * len(tensors[0]),
        lr=rate,
        beta1=config.beta1,
        beta2=config.beta2,
        weight_decay=config.weight_decay,
        eps=config.epsilon,
        amsgrad=False,
        maximize=False,
        grad_scale=grad_scale,
        found_inf=found_inf,
    )


class AdamW(Optimizer):
    """Torch's fused AdamW."""

    names = ("exp_avg", "exp_avg_sq")

    def _allocate(self) -> None:
        self._rates = [
            (factor, [index for index, each in enumerate(self._factors) if each == factor])
            for factor in sorted(set(self._factors))
        ]
        """Factors of the learning rate, each with the positions of its parameters."""

    def _change(self, grad_scale: Tensor, found_inf: Tensor) -> None:
        gradients = self._gradients()
        averages, squares = (self._parts(name) for name in self.names)
        for factor, positions in self._rates:
            weights, gradient, average, square = (
                [each[position] for position in positions]
                for each in (self._weights, gradients, averages, squares)
            )
            tensors = weights, gradient, average, square
            step(
                tensors, self.steps_taken, self._config, self._rate * factor, grad_scale, found_inf
            )
