"""Dropout of adapters, kohya's: of values of A x, of ranks, and of whole adapters.

Each choice is a function of the sample's key, the adapter and the place in A x, by integer arithmetic that
every device does alike. So it depends neither on the number of ranks nor on the division into micro batches,
and the same choice is made when a block recomputes its activations.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fluxtrain.contract.run.adapter import AdapterConfig

_MASK = 0xFFFFFFFF
_VALUES, _RANKS, _ADAPTER = 0x3C6EF372, 0xDAA66D2B, 0x78DDE6E4
"""Streams of a key: they are combined with it, so that the three kinds of dropout are independent."""


@dataclass(frozen=True)
class AdapterDropout:
    """Probabilities with which parts of an adapter's A x are zero in training."""

    values: float
    """Of each value; the others are scaled up."""
    ranks: float
    """Of each rank of a sample; the others are scaled up."""
    adapter: float
    """Of a sample's whole adapter; nothing is scaled."""

    @staticmethod
    def of(config: AdapterConfig) -> AdapterDropout | None:
        """Return the dropout of ``config``, None if it has none."""
        if not config.has_dropout:
            return None
        return AdapterDropout(config.dropout, config.rank_dropout, config.module_dropout)

    def apply(self, low: Float[Tensor, "b ... r"], keys: Int[Tensor, " b"]) -> Tensor:
        """Return ``low``, A x of samples with ``keys``, with some values zero."""
        shape = len(keys), *(1 for _ in low.shape[1:])
        keys = keys.view(shape)
        factor = torch.ones(shape, dtype=low.dtype, device=low.device)
        if self.adapter:
            factor = factor * _kept(keys ^ _ADAPTER, self.adapter)
        if self.ranks:
            places = _numbered(low.shape[-1:], low.device)
            factor = factor * _kept(places ^ _mixed(keys ^ _RANKS), self.ranks) / (1 - self.ranks)
        if self.values:
            places = _numbered(low.shape[1:], low.device)
            factor = (
                factor * _kept(places ^ _mixed(keys ^ _VALUES), self.values) / (1 - self.values)
            )
        return low * factor.to(low.dtype)


def adapter_keys(keys: Int[Tensor, " b"], names: list[str]) -> tuple[Int[Tensor, " b"], ...]:
    """Return keys of the samples with ``keys``, numbers below 2**32, for each of the adapters ``names``."""
    salts = torch.tensor([_salt(name) for name in names]).to(keys.device, non_blocking=True)
    return _mixed(_mixed(keys) ^ salts[:, None]).unbind()


def _salt(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")


def _numbered(shape: torch.Size, device: torch.device) -> Int[Tensor, ...]:
    """Return a pseudorandom number for each place of ``shape``."""
    return _mixed(torch.arange(shape.numel(), device=device)).view(shape)


def _kept(numbers: Int[Tensor, ...], probability: float) -> Tensor:
    """Return for each of ``numbers`` whether it is kept: with 1 - ``probability``."""
    return _mixed(numbers) >= int(probability * 2**32)


def _mixed(x: Int[Tensor, ...]) -> Int[Tensor, ...]:
    """Return a permutation of the numbers below 2**32 in which neighbours have nothing in common.

    Xorshifts and products in turn, as the end of MurmurHash3 has them. Products beyond int64 wrap around,
    which leaves their low half as it is.
    """
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & _MASK
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)
