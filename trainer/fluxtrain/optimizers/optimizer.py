"""What all optimizers share: weights, this rank's parts of them, gradients, and their norm.

Steps are computed in float32. Weights are in it too, but for those that are trained in bfloat16.

Torch's own dispatch each operator to every DTensor, which costs the host much of a short step. These compute
with the local parts, and never wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor, nn

from fluxtrain.contract.run.optim import OptimConfig
from fluxtrain.optimizers.bfloat16_weights import (
    Place,
    give_back,
    in_float32,
    take_averages,
    write_rounded,
)
from fluxtrain.optimizers.scaled_gradients import ScaledGradients
from fluxtrain.sharded_tensor import is_sharded, local_part, sum_over_parts

EMA = "ema"
"""Name of the moving average in a parameter's state."""
MOST_VALUES = 1 << 26
"""Values of the tensors that are changed together, which bounds the memory of intermediate results."""


class Optimizer(torch.optim.Optimizer):
    """Optimizer of all of a model's parameters.

    ``state`` has the state of each parameter, sharded as it is.
    """

    names: ClassVar[tuple[str, ...]] = ()
    """The state of a parameter that has its shape: in memory and in checkpoints."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        config: OptimConfig,
        compute: torch.dtype,
        factors: Sequence[float] = (),
        names: Sequence[str] = (),
        seed: int = 0,
    ) -> None:
        """Allocate the state of ``parameters``; those that are not sharded are rounded to ``compute``.

        ``factors`` multiply the learning rate of each parameter; without them it is that of all. Parameters
        in bfloat16 have no other value; how steps round them depends on ``names`` and ``seed``.
        """
        super().__init__(parameters, {"lr": config.learning_rate})
        self._is_bfloat16 = parameters[0].dtype == torch.bfloat16
        self.weights = {each: self._new_weight(each, compute) for each in parameters}
        """The value of each parameter, sharded as it is: what steps change, and checkpoints hold."""
        self.shared: dict[str, Tensor] = {}
        """State of the whole optimizer, divided by rows as the parameters are."""
        self._config, self._parameters = config, parameters
        for parameter in parameters:
            self.state[parameter] = self._new_state(self.weights[parameter])
            if config.ema_decay is not None:
                self.state[parameter][EMA] = self._copy(self.weights[parameter])
        self.steps_taken = torch.zeros((), dtype=torch.float32, device=parameters[0].device)
        """Number of steps until now, for the correction of the moments' bias."""
        self._owned = [each for each in parameters if local_part(each.detach()).numel() > 0]
        of_each = dict(zip(parameters, factors or [1.0] * len(parameters), strict=True))
        self._factors = [of_each[parameter] for parameter in self._owned]
        self._weights = [local_part(self.weights[parameter]) for parameter in self._owned]
        self._rounded = [
            each.detach() for each in parameters if each.dtype != self.weights[each].dtype
        ]
        self._seed, self._step = seed, 0
        names_of = dict(zip(parameters, names, strict=True)) if self._is_bfloat16 else {}
        self._places = [Place.of(names_of[each], each) for each in self._owned if names_of]
        self._allocate()

    def _allocate(self) -> None:
        """Allocate what is not the state of one parameter."""

    def _new_weight(self, parameter: nn.Parameter, compute: torch.dtype) -> Tensor:
        """Round ``parameter`` to ``compute`` unless it is sharded; return its value in float32.

        Gradients are then cast to float32 when they are added up. FSDP2 does both for sharded parameters.
        """
        weight = parameter.detach()
        if not is_sharded(parameter) and compute != weight.dtype:
            parameter.data = weight.to(compute)
            parameter.grad_dtype = weight.dtype
        return weight

    def _new_state(self, weight: Tensor) -> dict[str, Tensor]:
        return {name: self._zeros(weight) for name in self.names}

    def _zeros(self, weight: Tensor) -> Tensor:
        """Return zeros like ``weight``, in float32 if it is in bfloat16."""
        return torch.zeros_like(weight, dtype=torch.float32 if self._is_bfloat16 else None)

    def _copy(self, weight: Tensor) -> Tensor:
        """Return a copy of ``weight``, in float32 if it is in bfloat16."""
        return weight.float() if self._is_bfloat16 else weight.clone()

    def resume(self, steps: int) -> None:
        """Continue after ``steps`` steps, whose weights and state were loaded; every rank must call this."""
        self.steps_taken.fill_(steps)
        self._step = steps
        self._round()

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """Return the L2 norm of all gradients, on the device; every rank must call this."""
        squares = torch.zeros_like(self.steps_taken)
        if self._owned:
            dtype = torch.float32 if self._is_bfloat16 else None
            norms = torch._foreach_norm(self._gradients(), 2, dtype)
            squares = torch.stack(norms).square().sum()
        return sum_over_parts(squares, self._parameters[0]).sqrt()

    @torch.no_grad()
    def step(self, grad_scale: Tensor, found_inf: Tensor) -> None:  # type: ignore[override]
        """Take a step with all gradients divided by ``grad_scale``; change nothing if ``found_inf`` is 1.

        Both are numbers on the device. Every rank must call this.
        """
        self.steps_taken += 1 - found_inf
        self._step += 1
        self._change(grad_scale, found_inf)
        if self._config.ema_decay is not None:
            self._average(self._config.ema_decay, 1 - found_inf)
        self._round()

    @property
    def averages(self) -> bool:
        """Return whether the run is judged by averages of the weights."""
        return self._config.ema_decay is not None

    def judged(self, parameter: nn.Parameter) -> Tensor:
        """Return the value of ``parameter`` that the run is judged by, sharded as it is."""
        average: Tensor | None = self.state[parameter].get(EMA)
        return self.weights[parameter] if average is None else average

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """Give the parameters the values inside that the run is judged by."""
        if not self.averages:
            yield
            return
        self._exchange(take_averages)
        try:
            yield
        finally:
            self._exchange(give_back)

    @torch.no_grad()
    def _exchange(self, in_bfloat16: Callable[[list[Tensor], list[Tensor]], None]) -> None:
        """Exchange weights and averages, with ``in_bfloat16`` if the weights are."""
        averages = self._parts(EMA)
        if self._is_bfloat16:
            return in_bfloat16(self._weights, averages)
        for group in self._groups():
            kept = [weight.clone() for weight in self._weights[group]]
            torch._foreach_copy_(self._weights[group], averages[group])
            torch._foreach_copy_(averages[group], kept)
        self._round()

    def _average(self, decay: float, taken: Tensor) -> None:
        """Move the averages towards the weights, at first faster; not at all if ``taken`` is 0."""
        before = self.steps_taken - 1
        kept = ((1 + before) / (10 + before)).clamp(max=decay)
        rate = torch.where(before > 0, 1 - kept, 1.0) * taken
        averages = self._parts(EMA)
        for group in self._groups():
            difference = torch._foreach_sub(averages[group], self._weights[group])
            torch._foreach_mul_(difference, rate)
            torch._foreach_sub_(averages[group], difference)

    def _change(self, grad_scale: Tensor, found_inf: Tensor) -> None:
        """Change the weights and the state."""
        raise NotImplementedError

    @contextmanager
    def _changing(self, group: slice) -> Iterator[list[Tensor]]:
        """Give the weights in ``group`` to be changed in place, in float32; round those in bfloat16 then."""
        weights = self._weights[group]
        if not self._is_bfloat16:
            yield weights
            return
        flat, values = in_float32(weights)
        yield values
        write_rounded(weights, flat, self._places[group], self._seed, self._step)

    def _round(self) -> None:
        """Give the parameters that are not their weights the values of those."""
        if self._rounded:
            torch._foreach_copy_(self._rounded, self._weights)

    def _gradients(self) -> list[Tensor]:
        return [_local_gradient(parameter) for parameter in self._owned]

    def _scaled_gradients(self, grad_scale: Tensor, found_inf: Tensor) -> ScaledGradients:
        """Return the gradients divided by ``grad_scale``; zeros if ``found_inf`` is 1."""
        return ScaledGradients(self._gradients(), grad_scale, found_inf)

    def _parts(self, name: str) -> list[Tensor]:
        """Return this rank's parts of state ``name`` of the parameters that it owns."""
        return [local_part(self.state[parameter][name]) for parameter in self._owned]

    def _groups(self) -> Iterator[slice]:
        """Yield ranges of the parameters that this rank owns, of bounded size together."""
        begin = count = 0
        for end, weight in enumerate(self._weights):
            if end > begin and count + weight.numel() > MOST_VALUES:
                yield slice(begin, end)
                begin, count = end, 0
            count += weight.numel()
        if begin < len(self._weights):
            yield slice(begin, len(self._weights))

    def _scale(self, updates: list[Tensor] | tuple[Tensor, ...], group: slice) -> None:
        """Multiply ``updates`` of the parameters in ``group`` by their factors of the learning rate."""
        factors = self._factors[group]
        if any(factor != 1 for factor in factors):
            torch._foreach_mul_(updates, factors)

    @property
    def step_size(self) -> Tensor:
        """Return the factor of the learning rate that the optimizer found by itself, on the device."""
        return torch.ones_like(self.steps_taken)

    @property
    def _rate(self) -> float:
        """Return the learning rate of this step."""
        rate: float = self.param_groups[0]["lr"]
        return rate


def decay_of(rate: float, taken: Tensor) -> Tensor:
    """Return the factor of a moment that decays at ``rate``; 1 if ``taken``, a number, is 0."""
    return 1 - (1 - rate) * taken


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "every parameter takes part in the loss"
    return local_part(parameter.grad)
