"""Numbers in 8 bits: block-wise dynamic quantization (Dettmers et al., 2022), bitsandbytes' and torchao's.

A block is up to 256 neighbours in a row of a matrix. It has a scale, the largest magnitude; a code stands for
one of 256 numbers up to 1, which are the denser the smaller they are. Blocks end with their row, so that they
are the same for any division of the rows over ranks.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (the usual name)

from fluxtrain.contract.run.optim import QUANTIZED_BLOCK

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
