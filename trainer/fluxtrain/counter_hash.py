"""Random bits on the device, each a pure function of a key and a counter: SplitMix64 (Steele et al., 2014).

The host computes keys; a device computes the bits of any range of counters, so no generator has a state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
        high = (counters >> shift).bitwise_and_(
            (1 << (64 - shift)) - 1
        )  # without copies of the sign
        counters.bitwise_xor_(high)
        if factor != 1:
            counters.mul_(factor)
