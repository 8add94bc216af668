"""Which nodes meet, which the verdict names, and that it blames nobody if it cannot know."""

from __future__ import annotations

from itertools import combinations

import pytest

from fluxtrain.parallel.preflight import Measured, Verdict, num_rounds, partner

FAST, SLOW = 0.1, 1.0
NEVER = None


def product_verdict(seconds: list[float]) -> Verdict:
    return Verdict([Measured(f"node-{n}", own) for n, own in enumerate(seconds)], factor=1.5)


@pytest.mark.parametrize(
    ("seconds", "unfit"),
    [
        ([1.0], []),
        ([1.0, 1.5], []),
        ([1.0, 1.6], [1]),
        ([1.6, 1.0], [0]),
        ([1.0, 1.6, 1.6], []),  # most ranks are like that
        ([1.0, 1.0, 9.0, 1.0, 1.51], [2, 4]),
        ([0.1, 1.0, 1.0, 1.0, 1.0], []),
        ([0.0, 0.0], []),
    ],
)
def test_a_matrix_product_is_compared_with_the_median(
    seconds: list[float], unfit: list[int]
) -> None:
    assert list(product_verdict(seconds).unfit) == unfit


def link_verdict(
    num_nodes: int,
    slow_nodes: dict[int, float | None],
    slow_links: dict[frozenset[int], float | None] | None = None,
) -> Verdict:
    """A tournament in which links of some nodes, and some links, take another time."""
    rows: list[dict[int, float | None]] = [{} for _ in range(num_nodes)]
    for node, row in enumerate(rows):
        for turn in range(num_rounds(num_nodes)):
            other = partner(node, num_nodes, turn)
            if other is not None:
                values = [slow_nodes.get(node, FAST), slow_nodes.get(other, FAST)]
                values.append((slow_links or {}).get(frozenset({node, other}), FAST))
                finite = [value for value in values if value is not None]
                row[other] = max(finite) if len(finite) == len(values) else None
    ranks = [Measured(f"node-{n}", 1.0, row) for n, row in enumerate(rows)]
    return Verdict([Measured.from_json(rank.to_json()) for rank in ranks], factor=1.5)


@pytest.mark.parametrize("seconds", [SLOW, NEVER])
@pytest.mark.parametrize("num_nodes", [3, 4, 5, 6, 7, 8, 9, 33, 512])
def test_the_slow_end_is_told_from_its_partners(num_nodes: int, seconds: float | None) -> None:
    for slow in {0, 1, num_nodes // 2, num_nodes - 1}:
        verdict = link_verdict(num_nodes, {slow: seconds})
        assert list(verdict.unfit) == [slow]
        assert verdict.slow_links == []
        assert verdict.timed_out == (seconds is NEVER)


@pytest.mark.parametrize("seconds", [SLOW, NEVER])
@pytest.mark.parametrize("num_nodes", [4, 5, 6, 7, 8, 9])
def test_two_slow_nodes_accuse_no_other(num_nodes: int, seconds: float | None) -> None:
    for slow in combinations(range(num_nodes), 2):
        assert set(link_verdict(num_nodes, dict.fromkeys(slow, seconds)).unfit) == set(slow)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (SLOW, "takes 1 s, 10.0 times the median of all ranks (0.1 s)"),
        (NEVER, "did not end in time"),
    ],
)
@pytest.mark.parametrize("num_nodes", [3, 4, 5, 8])
def test_a_slow_link_between_two_good_nodes_is_named_and_nobody_blamed(
    num_nodes: int, seconds: float | None, text: str
) -> None:
    other = partner(0, num_nodes, 1) or 0
    verdict = link_verdict(num_nodes, {}, {frozenset({0, other}): seconds})
    assert verdict.unfit == {}
    [link] = verdict.slow_links
    assert (link.first, link.second) == (0, other)
    assert (
        verdict.describe_link(link)
        == f"an exchange between rank 0 on node-0 and rank {other} on node-{other} {text}"
    )


@pytest.mark.parametrize("seconds", [SLOW, NEVER])
def test_one_node_and_two_nodes_blame_nobody_for_links(seconds: float | None) -> None:
    assert link_verdict(1, {0: seconds}).unfit == {}
    verdict = link_verdict(2, {1: seconds})
    assert verdict.unfit == {}
    assert not verdict.can_blame_links


@pytest.mark.parametrize("slow", [2, 3, 4, 5])
def test_if_no_exchange_ends_between_most_ranks_nobody_is_blamed(slow: int) -> None:
    verdict = link_verdict(5, dict.fromkeys(range(slow), NEVER))
    blamed = range(slow) if slow == 2 else []  # three of five leave no median
    assert list(verdict.unfit) == list(blamed)


def test_links_as_slow_as_most_are_not_slow() -> None:
    assert link_verdict(5, dict.fromkeys(range(5), SLOW)).unfit == {}
    assert link_verdict(5, {}).slow_links == []


def test_only_one_of_eight_rails_is_slow() -> None:
    """Two nodes with eight ranks each: the link is named, as its ends cannot be told apart."""
    ranks = [
        Measured(f"node-{r // 8}", 1.0, {(r + 8) % 16: SLOW if r % 8 == 3 else FAST})
        for r in range(16)
    ]
    verdict = Verdict(ranks, factor=1.5)
    assert verdict.unfit == {}
    assert [(link.first, link.second) for link in verdict.slow_links] == [(3, 11)]


def test_an_exchange_that_one_end_did_not_see_ending_did_not_end() -> None:
    ranks = [
        Measured("a", 1.0, {1: FAST, 2: FAST}),
        Measured("b", 1.0, {0: NEVER, 2: FAST}),
        Measured("c", 1.0, {0: FAST, 1: FAST}),
    ]
    verdict = Verdict(ranks, factor=1.5)
    assert verdict.timed_out
    assert [(link.first, link.second) for link in verdict.slow_links] == [(0, 1)]


def test_the_sentence_has_figures_median_and_factor() -> None:
    ranks = [
        Measured("a", 9.0, {1: SLOW, 2: SLOW}),
        Measured("b", 1.0, {0: SLOW, 2: FAST}),
        Measured("c", 1.0, {0: SLOW, 1: FAST}),
    ]
    assert Verdict(ranks, factor=1.5).describe(0) == (
        "rank 0 on a is unfit: a matrix product takes 9 s, 9.0 times the median of all ranks (1 s); "
        "an exchange with each of 2 other nodes takes at least 1 s, 10.0 times the median of all ranks "
        "(0.1 s); spec.run.preflight.factor is 1.5"
    )


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
