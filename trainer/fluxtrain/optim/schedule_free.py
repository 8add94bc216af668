"""Schedule-free AdamW (Defazio et al., 2024): an average of the weights takes the place of a decay.

Three sequences: z takes AdamW's steps, x is its average, and gradients are those of y between both. The
parameters are y while training. Weights, of which evaluations and files are, are x: they are what the method
is about.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fluxtrain.optim.optimizer import Optimizer, RowVector, decay_of
from fluxtrain.parallel.sharding import local_part

_LARGEST, _TOTAL = range(2)
"""Places in ``shared["schedule_free"]``: the largest learning rate so far, and the sum of all weights."""


class ScheduleFreeAdamW(Optimizer):
    """Schedule-free AdamW; a step counts in the average as the square of the largest learning rate so far."""

    names = ("z", "exp_avg_sq")

    def _allocate(self) -> None:
        assert not self._is_bfloat16, "refused before"
        self._points = [local_part(parameter.detach()) for parameter in self._owned]
        self._numbers = RowVector(2, self.weights[self._parameters[0]], torch.float64)
        self.shared["schedule_free"] = self._numbers.rows

    def _new_weight(self, parameter: nn.Parameter, compute: torch.dtype) -> Tensor:
        weight = super()._new_weight(parameter, compute)
        return weight.clone() if parameter.dtype == torch.float32 else weight

    def _new_state(self, weight: Tensor) -> dict[str, Tensor]:
        return {**super()._new_state(weight), "z": weight.clone()}

    def resume(self, steps: int) -> None:
        """Continue after ``steps`` steps with the average's weights that were loaded."""
        self._numbers.load()
        super().resume(steps)

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """Give the parameters the weights x inside, to evaluate them."""
        if self._points:
            torch._foreach_copy_(self._points, self._weights)
        self.scale()
        try:
            yield
        finally:
            self._round()
            self.scale()

    def _change(self, grad_scale: Tensor, found_inf: Tensor) -> None:
        config, taken = self._config, 1 - found_inf
        gradients = self._scaled_gradients(grad_scale, found_inf)
        fraction = self._count(taken.double()).float()
        steps = self.steps_taken.double().clamp(min=1)
        correction = (1 - config.beta2**steps).sqrt().float()
        averages, squares = self._parts("z"), self._parts("exp_avg_sq")
        rate = self._rate * taken
        for group in self._groups():
            weights, z, square = self._weights[group], averages[group], squares[group]
            decayed = torch._foreach_mul(self._between(weights, z), config.weight_decay)
            torch._foreach_mul_(square, decay_of(config.beta2, taken))
            torch._foreach_addcmul_(
                square, gradients[group], gradients[group], value=1 - config.beta2
            )
            divisor = torch._foreach_div(torch._foreach_sqrt(square), correction)
            torch._foreach_add_(divisor, config.epsilon)
            update = torch._foreach_div(gradients[group], divisor)
            torch._foreach_add_(update, decayed)
            torch._foreach_mul_(update, rate)
            self._scale(update, group)
            torch._foreach_sub_(z, update)
            torch._foreach_mul_(weights, 1 - fraction)
            torch._foreach_add_(weights, torch._foreach_mul(z, fraction))
        self._numbers.save()

    def _count(self, taken: Tensor) -> Tensor:
        """Add this step to the average's weights; return its fraction of all, 0 if it is not ``taken``."""
        largest, total = self._numbers.values.unbind()
        largest = torch.clamp(largest, min=self._rate)
        weight = largest**2 * taken
        total = total + weight
        self._numbers.values.copy_(torch.stack([largest, total]))
        return weight / total.clamp(min=torch.finfo(torch.float64).tiny)

    def _between(self, weights: list[Tensor], z: list[Tensor]) -> tuple[Tensor, ...]:
        """Return y."""
        return torch._foreach_lerp(z, weights, self._config.beta1)

    def _round(self) -> None:
        """Give the parameters the values of y."""
        averages = self._parts("z")
        for group in self._groups():
            points = self._between(self._weights[group], averages[group])
            torch._foreach_copy_(self._points[group], points)
