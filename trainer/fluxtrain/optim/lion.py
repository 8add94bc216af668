"""Lion (Chen et al., 2023): steps of one size, in the direction of the sign of a momentum."""

from __future__ import annotations

import torch
from torch import Tensor

from fluxtrain.optim.optimizer import Optimizer, decay_of


class Lion(Optimizer):
    """Lion with decoupled weight decay, times the learning rate."""

    names = ("exp_avg",)

    def _change(self, grad_scale: Tensor, found_inf: Tensor) -> None:
        config, taken = self._config, 1 - found_inf
        gradients = self._scaled_gradients(grad_scale, found_inf)
        averages, step = self._parts("exp_avg"), self._rate * taken
        for group in self._groups():
            gradient, average = gradients[group], averages[group]
            with self._changing(group) as weights:
                update = torch._foreach_mul(average, config.beta1)
                torch._foreach_add_(update, gradient, alpha=1 - config.beta1)
                torch._foreach_sign_(update)
                torch._foreach_add_(update, weights, alpha=config.weight_decay)
                torch._foreach_mul_(update, step)
                self._scale(update, group)
                torch._foreach_sub_(weights, update)
            torch._foreach_mul_(average, decay_of(config.beta2, taken))
            torch._foreach_add_(average, gradient, alpha=1 - config.beta2)
