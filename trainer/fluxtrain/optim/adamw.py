"""AdamW: by a kernel of our own on a GPU, by torch's fused one elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the usual name)

from fluxtrain.contract.run.optim import QUANTIZED_BLOCK, OptimConfig, is_quantized
from fluxtrain.optim.optimizer import Optimizer, in_float32
from fluxtrain.parallel.sharding import local_part, rows_like

if TYPE_CHECKING:
    from fluxtrain.optim.fused import FusedStep


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
    """AdamW whose weights in float32 are changed in one launch on a GPU, if it is ``fused``."""

    names = ("exp_avg", "exp_avg_sq")

    def _allocate(self) -> None:
        is_plain = self._is_fused and not self._is_bfloat16
        self._fused = _fused(self._factors, self.steps_taken.device) if is_plain else None
        self._rounds = self._fused is not None
        is_small = self._is_bfloat16 or not self._sums  # a float32 copy of the gradients is made
        groups = self._groups() if is_small else [slice(0, len(self._owned))]
        self._rates = [(group, _by_factor(self._factors[group])) for group in groups]
        """Parameters, and of each factor of the learning rate the positions among them."""

    def _change(self, grad_scale: Tensor, found_inf: Tensor) -> None:
        gradients = self._gradients()
        averages, squares = (self._parts(name) for name in self.names)
        if self._fused is not None and self._owned:
            tensors = self._weights, gradients, averages, squares
            numbers = self._config, self._rate, self.steps_taken, grad_scale, found_inf
            return self._fused.take(tensors, self._rounded, *numbers)
        for group, rates in self._rates:
            with self._changing(group) as weights:
                own = gradients[group]
                if own and own[0].dtype == torch.bfloat16:
                    _, own = in_float32(own)
                of_each = weights, own, averages[group], squares[group]
                for factor, positions in rates:
                    weight, gradient, average, square = (
                        [each[position] for position in positions] for each in of_each
                    )
                    tensors = weight, gradient, average, square
                    rate = self._rate * factor
                    step(tensors, self.steps_taken, self._config, rate, grad_scale, found_inf)


def _fused(factors: list[float], device: torch.device) -> FusedStep | None:
    """Return the kernel of parameters with these ``factors``; None on a CPU."""
    if device.type != "cuda":
        return None
    from fluxtrain.optim.fused import FusedStep  # Triton takes a second to import

    return FusedStep(factors, device)


def _by_factor(factors: list[float]) -> list[tuple[float, list[int]]]:
    """Return the positions of each of ``factors``."""
    return [
        (factor, [position for position, each in enumerate(factors) if each == factor])
        for factor in sorted(set(factors))
    ]


# AdamW with both moments in 8 bits, as torchao's; those of vectors and narrow matrices are in
# float32.


MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""The moments, and whether they have a sign."""
SCALE = "_scale"
"""Suffix of the scales' names."""


class AdamW8bit(Optimizer):
    """Torch's fused AdamW on one parameter after the other, whose moments are in float32 only meanwhile."""

    def _allocate(self) -> None:
        device = self.steps_taken.device
        self._codes = {name: DynamicCode(signed, device) for name, signed in MOMENTS.items()}

    def _new_state(self, weight: Tensor) -> dict[str, Tensor]:
        if not is_quantized(tuple(weight.shape)):
            return {name: self._zeros(weight) for name in MOMENTS}
        state = {}
        for name in MOMENTS:
            state[name] = torch.zeros_like(weight, dtype=torch.uint8)
            state[name + SCALE] = rows_like(weight, num_blocks(weight.shape[1]))
        return state

    def _change(self, grad_scale: Tensor, found_inf: Tensor) -> None:
        for index, (parameter, gradient, factor) in enumerate(
            zip(self._owned, self._gradients(), self._factors, strict=True)
        ):
            average, square = (self._moment(parameter, name) for name in MOMENTS)
            with self._changing(slice(index, index + 1)) as weight:
                tensors = weight, [gradient.float()], [average], [square]
                rate = self._rate * factor
                step(tensors, self.steps_taken, self._config, rate, grad_scale, found_inf)
            for name, values in zip(MOMENTS, (average, square), strict=True):
                self._keep(parameter, name, values, found_inf.bool())

    def _moment(self, parameter: nn.Parameter, name: str) -> Tensor:
        """Return moment ``name`` of ``parameter`` in float32, this rank's part."""
        state = self.state[parameter]
        values = local_part(state[name])
        if name + SCALE not in state:
            return values
        return self._codes[name].dequantized(values, local_part(state[name + SCALE]))

    def _keep(self, parameter: nn.Parameter, name: str, values: Tensor, is_bad: Tensor) -> None:
        """Keep ``values`` as moment ``name`` of ``parameter``, unless ``is_bad``."""
        state = self.state[parameter]
        if name + SCALE not in state:
            return
        new = self._codes[name].quantized(values)
        for kept, each in zip((name, name + SCALE), new, strict=True):
            old = local_part(state[kept])
            old.copy_(torch.where(is_bad, old, each))


# Numbers in 8 bits: block-wise dynamic quantization (Dettmers et al., 2022), bitsandbytes' and
# torchao's.
#
# A block is up to 256 neighbours in a row of a matrix. It has a scale, the largest magnitude; a
# code stands for one of 256 numbers up to 1, which are the denser the smaller they are. Blocks end
# with their row, so that they are the same for any division of the rows over ranks.


_DECADES = 7
_LEAST_SCALE = 1e-12
"""Scale of a block of zeros."""


def _numbers(is_signed: bool) -> list[float]:
    numbers = [0.0, 1.0]
    for decade in range(_DECADES):
        ends = torch.linspace(0.1, 1, 2 ** (decade if is_signed else decade + 1) + 1)
        middles = ((ends[:-1] + ends[1:]) / 2 * 10.0 ** (decade + 1 - _DECADES)).tolist()
        numbers += [*middles, *(-each for each in middles if is_signed)]
    return sorted(numbers)


_BOOKS = {is_signed: _numbers(is_signed) for is_signed in (False, True)}


def code_book(is_signed: bool) -> Float[Tensor, 256]:
    """Return the numbers that codes stand for, in order.

    Each of seven decades below 1 is divided evenly, twice as finely as the one below it.
    """
    return torch.tensor(_BOOKS[is_signed])


def num_blocks(columns: int) -> int:
    """Return the blocks of a row of ``columns`` numbers."""
    return -(-columns // QUANTIZED_BLOCK)


class DynamicCode:
    """The code of numbers with a sign, or without one, on a device."""

    def __init__(self, is_signed: bool, device: torch.device) -> None:
        """Keep the code book, and the borders between its numbers, on ``device``."""
        book = code_book(is_signed)
        self._book = book.to(device)
        self._borders = ((book[:-1] + book[1:]) / 2).to(device)

    def quantized(
        self, values: Float[Tensor, "rows columns"]
    ) -> tuple[UInt8[Tensor, "rows columns"], Float[Tensor, "rows blocks"]]:
        """Return the codes of ``values`` and the scales of their blocks."""
        rows, columns = values.shape
        blocks = num_blocks(columns)
        padded = F.pad(values, (0, blocks * QUANTIZED_BLOCK - columns)).view(rows, blocks, -1)
        scales = padded.abs().amax(dim=-1).clamp_(min=_LEAST_SCALE)
        numbers = padded / scales.unsqueeze(-1)
        codes = torch.bucketize(numbers, self._borders, out_int32=True, right=True)
        return codes.to(torch.uint8).view(rows, -1)[:, :columns], scales

    def dequantized(
        self, codes: UInt8[Tensor, "rows columns"], scales: Float[Tensor, "rows blocks"]
    ) -> Float[Tensor, "rows columns"]:
        """Return the numbers that ``codes`` stand for, times the ``scales`` of their blocks."""
        values = self._book.index_select(0, codes.reshape(-1).int()).view(codes.shape)
        each = scales.unsqueeze(-1).expand(-1, -1, QUANTIZED_BLOCK).flatten(1)
        return values.mul_(each[:, : codes.shape[1]])
