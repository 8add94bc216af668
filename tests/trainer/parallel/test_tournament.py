"""Nodes meet in rounds: at most one other at a time, several others in all, and nobody twice."""

from __future__ import annotations

import pytest

from fluxtrain.parallel.preflight import num_rounds, partner

SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 63, 64, 65, 511, 512]


def partners(num_nodes: int) -> list[list[int]]:
    """The partners of each node."""
    rounds = range(num_rounds(num_nodes))
    met = [[partner(node, num_nodes, turn) for turn in rounds] for node in range(num_nodes)]
    return [[other for other in others if other is not None] for others in met]


@pytest.mark.parametrize("num_nodes", SIZES)
def test_partners_agree_that_they_meet(num_nodes: int) -> None:
    for turn in range(num_rounds(num_nodes)):
        for node in range(num_nodes):
            other = partner(node, num_nodes, turn)
            assert other is None or other in range(num_nodes)
            assert other is None or (other != node and partner(other, num_nodes, turn) == node)


@pytest.mark.parametrize("num_nodes", SIZES)
def test_each_node_meets_three_others_or_all_and_nobody_twice(num_nodes: int) -> None:
    for others in partners(num_nodes):
        assert len(set(others)) == len(others) >= min(3, num_nodes - 1)


@pytest.mark.parametrize(
    ("num_nodes", "rounds"), [(1, 0), (2, 1), (3, 3), (4, 3), (5, 4), (8, 3), (64, 6), (512, 9)]
)
def test_the_rounds_grow_with_the_logarithm(num_nodes: int, rounds: int) -> None:
    assert num_rounds(num_nodes) == rounds


def test_partners_are_near_and_far() -> None:
    for node, others in enumerate(partners(64)):
        assert max(others) - min(others) > 32, node
