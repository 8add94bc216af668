"""What all optimizers share: weights, this rank's parts of them, gradients, and their norm.

Steps are computed in float32. Weights are in it too, but for those that are trained in bfloat16.

Torch's own dispatch each operator to every DTensor, which costs the host much of a short step. These compute
with the local parts, and never wait for the device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fluxtrain.contract.run.optim import OptimConfig
from fluxtrain.parallel.sharding import (
    divided,
    is_sharded,
    local_part,
    sum_over_parts,
    values_before,
    whole,
    whole_of,
)

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
        accumulates: bool = True,
        fused: bool = False,
    ) -> None:
        """Allocate the state of ``parameters``; those that are not sharded are rounded to ``compute``.

        ``factors`` multiply the learning rate of each parameter; without them it is that of all. Parameters
        in bfloat16 have no other value; how steps round them depends on ``names`` and ``seed``. Unless it
        ``accumulates`` those of several micro batches, gradients may stay in ``compute``, as they come.
        ``fused``: a kernel of Triton changes weights in float32, where there is one.
        """
        super().__init__(parameters, {"lr": config.learning_rate})
        self._sums = accumulates or not config.kind.takes_rounded_gradients
        self._is_fused = fused
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
        self.scale: Callable[[], None] = lambda: None
        """Called on every rank after the parameters have other values."""
        self._rounds = False
        """Whether a change of the weights gives the parameters their values too."""
        self._seed, self._step = seed, 0
        names_of = dict(zip(parameters, names, strict=True)) if self._is_bfloat16 else {}
        self._places = [Place.of(names_of[each], each) for each in self._owned if names_of]
        self._allocate()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Keep the only group. Torch's own imports its compiler, half a second of a start without it."""
        self.param_groups.append(self.defaults | param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients, whatever ``set_to_none`` is; torch's own imports its compiler too."""
        for parameter in self._parameters:
            parameter.grad = None

    def _allocate(self) -> None:
        """Allocate what is not the state of one parameter."""

    def _new_weight(self, parameter: nn.Parameter, compute: torch.dtype) -> Tensor:
        """Round ``parameter`` to ``compute`` unless it is sharded; return its value in float32.

        Gradients are then cast to float32 if they are added up. FSDP2 does both for sharded parameters.
        """
        weight = parameter.detach()
        if not is_sharded(parameter) and compute != weight.dtype:
            parameter.data = weight.to(compute)
            if self._sums:
                parameter.grad_dtype = weight.dtype
        return weight

    def _new_state(self, weight: Tensor) -> dict[str, Tensor]:
        return {name: self._zeros(weight) for name in self.names}

    def _zeros(self, weight: Tensor) -> Tensor:
        """Return zeros like ``weight``, in float32 if it is in bfloat16."""
        dtype = torch.float32 if self._is_bfloat16 else None
        return whole_of(torch.zeros_like(local_part(weight), dtype=dtype), weight)

    def _copy(self, weight: Tensor) -> Tensor:
        """Return a copy of ``weight``, in float32 if it is in bfloat16."""
        return weight.float() if self._is_bfloat16 else weight.clone()

    def resume(self, steps: int) -> None:
        """Continue after ``steps`` steps, whose weights and state were loaded; every rank must call this."""
        self.steps_taken.fill_(steps)
        self._step = steps
        self._round()
        self.scale()

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """Return the L2 norm of all gradients, on the device; every rank must call this."""
        squares = torch.zeros_like(self.steps_taken)
        if self._owned:
            gradients = self._gradients()
            dtype = torch.float32 if gradients[0].dtype == torch.bfloat16 else None
            norms = torch._foreach_norm(gradients, 2, dtype)
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
        if not self._rounds:
            self._round()
        self.scale()

    @property
    def averages(self) -> bool:
        """Return whether the run is judged by averages of the weights."""
        return self._config.averages

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
        self.scale()
        try:
            yield
        finally:
            self._exchange(give_back)
            self.scale()

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
        rate: float = self.param_groups[0]["lr"]
        return rate


def decay_of(rate: float, taken: Tensor) -> Tensor:
    """Return the factor of a moment that decays at ``rate``; 1 if ``taken``, a number, is 0."""
    return 1 - (1 - rate) * taken


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "every parameter takes part in the loss"
    return local_part(parameter.grad)


class RowVector:
    """``values``, the same on all ranks, and ``rows``, divided as the parameters are."""

    def __init__(self, size: int, like: Tensor, dtype: torch.dtype) -> None:
        """Allocate ``size`` zeros, divided by rows as ``like`` is."""
        self.values = torch.zeros(size, dtype=dtype, device=local_part(like).device)
        """What ranks compute with."""
        self._own, self.rows = divided(self.values, like)

    def save(self) -> None:
        """Write this rank's values into its rows."""
        if self.rows is not self.values:
            local_part(self.rows).copy_(self._own)

    def load(self) -> None:
        """Read the values from the rows of all ranks; every rank must call this."""
        if self.rows is not self.values:
            self.values.copy_(whole(self.rows))


class ScaledGradients:
    """Gradients divided by a number; zeros instead if a step is not to be taken."""

    def __init__(self, gradients: list[Tensor], grad_scale: Tensor, found_inf: Tensor) -> None:
        """Divide ``gradients`` in place by ``grad_scale``, or make zeros of them if ``found_inf`` is 1.

        Those in bfloat16 stay as they are: a float32 copy is divided each time that one is asked for.
        """
        self._gradients, self._scale, self._is_bad = gradients, grad_scale, found_inf.bool()
        self.are_kept = not gradients or gradients[0].dtype != torch.bfloat16
        """Whether what is changed in place stays changed."""
        if self.are_kept:
            self._divide(gradients)

    def __getitem__(self, group: slice) -> list[Tensor]:
        """Return the gradients of the parameters in ``group``, which may be changed in place."""
        if self.are_kept:
            return self._gradients[group]
        _, gradients = in_float32(self._gradients[group])
        self._divide(gradients)
        return gradients

    def _divide(self, gradients: list[Tensor]) -> None:
        if gradients:
            torch._foreach_div_(gradients, self._scale)
        for gradient in gradients:
            gradient.masked_fill_(self._is_bad, 0.0)


# Weights in bfloat16 without a copy in float32: each step rounds them stochastically.
#
# The probability of rounding up is the fraction of the distance to the next bfloat16 number, so
# updates that are far below that distance are taken on average. The random bits are a pure function
# of seed, step, parameter, and place in the whole parameter: the same on any number of ranks, and
# in a run that resumes.


_LOW_BITS = 0xFFFF
"""Bits of a float32 number that bfloat16 does not have."""
_HALF = 0x8000
"""Added to the bits of a float32 number, it rounds their high half to the nearest."""


@dataclass(frozen=True)
class Place:
    """Where this rank's part of a parameter is in the whole."""

    name: str
    begin: int
    count: int

    @classmethod
    def of(cls, name: str, weight: Tensor) -> Place:
        """Return the place of this rank's part of ``weight``, the value of parameter ``name``."""
        return cls(name, values_before(weight), local_part(weight).numel())

    def numbers(self, seed: int, step: int) -> Range:
        """Return the random numbers of the part in ``step`` of the run of ``seed``, one for each value."""
        return Range(key_of("rounding", seed, step, self.name), self.begin, self.count)


def in_float32(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return a float32 copy of ``tensors``: the values of all as one vector, and as views like each."""
    sizes = [tensor.numel() for tensor in tensors]
    flat = torch.empty(sum(sizes), device=tensors[0].device)
    copies = [
        own.view(each.shape) for own, each in zip(torch.split(flat, sizes), tensors, strict=True)
    ]
    torch._foreach_copy_(copies, list(tensors))
    return flat, copies


def write_rounded(
    weights: Sequence[Tensor], values: Tensor, places: Sequence[Place], seed: int, step: int
) -> None:
    """Round the float32 vector ``values`` of all ``weights``, which are at ``places``, into them."""
    numbers = random_numbers([place.numbers(seed, step) for place in places], values.device)
    parts = torch.split(rounded(values, numbers), [weight.numel() for weight in weights])
    new = [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)]
    torch._foreach_copy_(list(weights), new)


def rounded(values: Tensor, numbers: Tensor) -> Tensor:
    """Return float32 ``values`` in bfloat16, rounded away from zero where the low bits exceed ``numbers``.

    Those are random int16. What bfloat16 holds exactly, infinities and NaN stay as they are.
    """
    bits = numbers.int().bitwise_and_(_LOW_BITS).add_(values.view(torch.int32))
    return _high(bits).contiguous().masked_fill_(values.isnan(), torch.nan)


def take_averages(weights: Sequence[Tensor], averages: Sequence[Tensor]) -> None:
    """Give ``weights`` the rounded float32 ``averages``, which keep the weights in their place meanwhile."""
    for weight, average in zip(weights, averages, strict=True):
        average.view(torch.int32).add_(_HALF)
        _exchange(weight, average)


def give_back(weights: Sequence[Tensor], averages: Sequence[Tensor]) -> None:
    """Undo `take_averages`, to the bit."""
    for weight, average in zip(weights, averages, strict=True):
        _exchange(weight, average)
        average.view(torch.int32).sub_(_HALF)


def _exchange(weight: Tensor, average: Tensor) -> None:
    """Exchange ``weight`` and the high halves of the float32 numbers ``average``."""
    high, kept = _high(average), weight.clone()
    weight.copy_(high)
    high.copy_(kept)


def _high(values: Tensor) -> Tensor:
    """Return the high halves of float32 or int32 ``values``, not copied: the second ones, as in memory."""
    return values.view(torch.bfloat16)[..., 1::2]


# Random bits on the device, each a pure function of a key and a counter: SplitMix64 (Steele et al.,
# 2014).
#
# The host computes keys; a device computes the bits of any range of counters, so no generator has a
# state.


LANES = 4
"""Numbers of 16 bits in the hash of one counter."""
_KEY_BITS = 62
"""A key plus a counter stays below 2**63."""


def _signed(value: int) -> int:
    """Return the int64 with the bits of ``value``, as torch has no uint64 arithmetic."""
    return value - (1 << 64) if value >> 63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_ROUNDS = (
    (30, _signed(0xBF58476D1CE4E5B9)),
    (27, _signed(0x94D049BB133111EB)),
    (31, 1),
)
"""SplitMix64's shifts, and the factor after each."""


@dataclass(frozen=True)
class Range:
    """The numbers ``begin`` to ``begin + count`` of the sequence of ``key``."""

    key: int
    begin: int
    count: int

    @property
    def counters(self) -> range:
        """Return the counters whose hashes have these numbers."""
        return range(self.begin // LANES, -(-(self.begin + self.count) // LANES))


def key_of(*parts: object) -> int:
    """Return the key of ``parts``: equal ones have equal keys, on any machine."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> (64 - _KEY_BITS)


def random_numbers(ranges: Sequence[Range], device: torch.device) -> Tensor:
    """Return the numbers of 16 bits of all ``ranges``, one after the other, as int16."""
    sizes = [len(each.counters) for each in ranges]
    hashes = torch.empty(sum(sizes), dtype=torch.int64, device=device)
    for each, own in zip(ranges, torch.split(hashes, sizes), strict=True):
        first = each.key + each.counters.start
        torch.arange(first, first + len(own), out=own)
    _mix(hashes)
    lanes = torch.split(hashes.view(torch.int16), [LANES * size for size in sizes])
    return torch.cat(
        [own[each.begin % LANES :][: each.count] for each, own in zip(ranges, lanes, strict=True)]
    )


def _mix(counters: Tensor) -> None:
    """Replace int64 ``counters`` by their hashes; products keep their lowest 64 bits."""
    counters.mul_(_GAMMA)
    for shift, factor in _ROUNDS:
        # without copies of the sign
        high = (counters >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        counters.bitwise_xor_(high)
        if factor != 1:
            counters.mul_(factor)
