"""AdamW: torch's fused kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from fluxtrain.contract.run.optim import OptimConfig
from fluxtrain.optimizers.bfloat16_weights import in_float32
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
        groups = self._groups() if self._is_bfloat16 else [slice(0, len(self._owned))]
        self._rates = [(group, _by_factor(self._factors[group])) for group in groups]
        """Parameters, and of each factor of the learning rate the positions among them."""

    def _change(self, grad_scale: Tensor, found_inf: Tensor) -> None:
        gradients = self._gradients()
        averages, squares = (self._parts(name) for name in self.names)
        for group, rates in self._rates:
            with self._changing(group) as weights:
                own = gradients[group]
                if self._is_bfloat16:
                    _, own = in_float32(own)
                of_each = weights, own, averages[group], squares[group]
                for factor, positions in rates:
                    weight, gradient, average, square = (
                        [each[position] for position in positions] for each in of_each
                    )
                    tensors = weight, gradient, average, square
                    rate = self._rate * factor
                    step(tensors, self.steps_taken, self._config, rate, grad_scale, found_inf)


def _by_factor(factors: list[float]) -> list[tuple[float, list[int]]]:
    """Return the positions of each of ``factors``."""
    return [
        (factor, [position for position, each in enumerate(factors) if each == factor])
        for factor in sorted(set(factors))
    ]
