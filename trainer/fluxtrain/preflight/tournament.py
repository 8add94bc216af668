"""Which nodes exchange data with each other: rounds in which each node meets one other at most."""

from __future__ import annotations

import math

_MIN_PARTNERS = 3
"""Nodes that each one meets, if there are as many: two of them may be at fault without accusing it."""


def num_rounds(num_nodes: int) -> int:
    """Return the number of rounds, which grows with the logarithm of the nodes."""
    if num_nodes < 2:
        return 0
    rests = num_nodes % 2  # of an odd number one node rests in each round
    wanted = max(_MIN_PARTNERS, math.ceil(math.log2(num_nodes))) + rests
    return min(wanted, num_nodes - 1 + rests)


def partner(node: int, num_nodes: int, turn: int) -> int | None:
    """Return the node that ``node`` meets in round ``turn``, another one in each; None if it rests.

    The circle method: in round r the nodes i and j meet if i + j = r, modulo the nodes but the last. The
    rounds are spread, so that partners are near and far in the order of the ranks.
    """
    last = num_nodes - 1 + num_nodes % 2  # of an odd number nobody: its partner rests
    r = turn * last // num_rounds(num_nodes)
    if node == last:
        return r * (last + 1) // 2 % last
    found = (r - node) % last
    if found == node:
        found = last
    return found if found < num_nodes else None
