"""Prodigy (Mishchenko and Defazio, 2023): Adam whose step size is estimated from the distance travelled.

One reduction of two numbers over the ranks serves all parameters, and no number is read by the host.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fluxtrain.optim.optimizer import Optimizer, RowVector, ScaledGradients, decay_of
from fluxtrain.parallel.sharding import sum_over_parts

_ESTIMATE, _LARGEST, _NUMERATOR = range(3)
"""Places in ``shared["prodigy"]``: d, the largest estimate so far, and the numerator of the next one."""


class Prodigy(Optimizer):
    """Prodigy with decoupled weight decay; the learning rate is a factor of its step size."""

    names = ("exp_avg", "exp_avg_sq", "s", "p0")

    def _allocate(self) -> None:
        assert all(factor == 1 for factor in self._factors), "refused before"
        self._beta3 = math.sqrt(self._config.beta2)
        self._numbers = RowVector(3, self.weights[self._parameters[0]], torch.float64)
        self._numbers.values[_ESTIMATE:_NUMERATOR] = self._config.prodigy.d0
        self._numbers.save()
        self.shared["prodigy"] = self._numbers.rows

    def _new_state(self, weight: Tensor) -> dict[str, Tensor]:
        return {**super()._new_state(weight), "p0": self._copy(weight)}

    def resume(self, steps: int) -> None:
        """Continue after ``steps`` steps with the estimate that was loaded."""
        self._numbers.load()
        super().resume(steps)

    @property
    def step_size(self) -> Tensor:
        """Return the estimate d, on the device."""
        return self._numbers.values[_ESTIMATE]

    def _change(self, grad_scale: Tensor, found_inf: Tensor) -> None:
        taken = (1 - found_inf).double()
        estimate = self._numbers.values[_ESTIMATE].clone()
        rate = estimate * self._rate * self._correction()  # of this step, by the estimate before it
        gradients = self._scaled_gradients(grad_scale, found_inf)
        sums = self._accumulate(gradients, estimate, rate, taken)
        sum_over_parts(sums, self.weights[self._parameters[0]])
        moves = taken * (sums[1] > 0)
        self._estimate(sums, moves)
        self._move(rate * moves)
        self._numbers.save()

    def _correction(self) -> Tensor | float:
        """Return the correction of the moments' bias, 1 if it is off."""
        if not self._config.prodigy.bias_correction:
            return 1.0
        steps = self.steps_taken.double().clamp(min=1)
        return (1 - self._config.beta2**steps).sqrt() / (1 - self._config.beta1**steps)

    def _accumulate(
        self, gradients: ScaledGradients, estimate: Tensor, rate: Tensor, taken: Tensor
    ) -> Tensor:
        """Add the gradients to the state; return this rank's terms of the next estimate's fraction."""
        config = self._config
        relative = estimate / config.prodigy.d0
        warms_up = config.prodigy.safeguard_warmup
        factor = (relative * (estimate if warms_up else rate)).float()
        averages, squares, sums, starts = (self._parts(name) for name in self.names)
        fraction = torch.zeros(2, dtype=torch.float64, device=estimate.device)
        first = (estimate * (1 - config.beta1)).float()
        second = (estimate * math.sqrt(1 - config.beta2)).float()
        for group in self._groups():
            gradient = gradients[group]
            travelled = torch._foreach_sub(starts[group], self._weights[group])
            products = torch._foreach_mul(travelled, gradient)
            fraction[0] += relative * rate * _total(products)
            for moment, rate_of, scale in (
                (averages[group], config.beta1, first),
                (sums[group], self._beta3, factor),
            ):
                torch._foreach_mul_(moment, decay_of(rate_of, taken).float())
                torch._foreach_add_(moment, torch._foreach_mul(gradient, scale))
            scaled = torch._foreach_mul(gradient, second)
            torch._foreach_mul_(squares[group], decay_of(config.beta2, taken).float())
            torch._foreach_addcmul_(squares[group], scaled, scaled)
            fraction[1] += _total(torch._foreach_abs(sums[group]))
        return fraction

    def _estimate(self, sums: Tensor, moves: Tensor) -> None:
        """Replace the estimate and what it is made of, unless ``moves`` is 0."""
        prodigy, numbers = self._config.prodigy, self._numbers.values
        estimate, largest, numerator = numbers.clone().unbind()
        numerator = numerator * self._beta3 + sums[0]
        found = prodigy.d_coef * numerator / sums[1].clamp(min=torch.finfo(torch.float64).tiny)
        is_first = estimate == prodigy.d0
        estimate = torch.where(is_first, torch.maximum(estimate, found), estimate)
        largest = torch.maximum(largest, found)
        growth = prodigy.growth_rate
        grown = estimate * growth if growth is not None else largest
        new = torch.stack([torch.minimum(largest, grown), largest, numerator])
        numbers.copy_(torch.where(moves > 0, new, numbers))

    def _move(self, rate: Tensor) -> None:
        """Change the weights by steps of ``rate``, 0 for none."""
        config, moved = self._config, rate.float()
        epsilon = (self.step_size * config.epsilon).float()
        averages, squares = self._parts("exp_avg"), self._parts("exp_avg_sq")
        for group in self._groups():
            divisor = torch._foreach_sqrt(squares[group])
            torch._foreach_add_(divisor, [epsilon] * len(divisor))
            update = torch._foreach_div(averages[group], divisor)
            with self._changing(group) as weights:
                torch._foreach_add_(update, weights, alpha=config.weight_decay)
                torch._foreach_mul_(update, moved)
                torch._foreach_sub_(weights, update)


def _total(tensors: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    """Return the sum of all values of ``tensors``, float64."""
    return torch.stack([tensor.sum(dtype=torch.float64) for tensor in tensors]).sum()
