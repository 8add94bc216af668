"""AdamW: torch's fused kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from fluxtrain.optimizers.optimizer import Optimizer


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
        config, gradients = self._config, self._gradients()
        averages, squares = (self._parts(name) for name in self.names)
        for factor, positions in self._rates:
            weights, gradient, average, square = (
                [tensors[position] for position in positions]
                for tensors in (self._weights, gradients, averages, squares)
            )
            torch._fused_adamw_(
                weights,
                gradient,
                average,
                square,
                [],
                [self.steps_taken] * len(positions),
                lr=self._rate * factor,
                beta1=config.beta1,
                beta2=config.beta2,
                weight_decay=config.weight_decay,
                eps=config.epsilon,
                amsgrad=False,
                maximize=False,
                grad_scale=grad_scale,
                found_inf=found_inf,
            )
