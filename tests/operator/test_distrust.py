"""Distrust of nodes: sums, decay, limits; statuses that others have edited."""

from __future__ import annotations

from typing import Any

import pytest

from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.base.node_health import (
    EXCLUDED_FROM,
    EXCLUDED_PERCENT,
    MAX_AVOIDED,
    MAX_EXCLUDED,
    Distrust,
    Fault,
    Score,
    faults_of,
    ordered,
    score,
)

NOW = 1_800_000_000.0
HOUR = 3600.0
LOST = "NodeLost"


def faults(*hours_ago: float, reason: str = LOST) -> list[Fault]:
    return [Fault("a", reason, NOW - hours * HOUR) for hours in hours_ago]


@pytest.mark.parametrize(
    ("listed", "value"),
    [
        ([], 0.0),
        (faults(0), 1.0),
        (faults(4), 0.5),
        (faults(16), 1 / 16),
        (faults(0, 4, 8), 1.75),
        (faults(0, reason="Killed"), 0.5),
        (faults(0, reason="OfANewerOperator"), 0.5),
        (faults(0, 59 / HOUR, 59 / HOUR), 2 ** (-59 / (4 * HOUR))),  # one event
        (faults(0, 60 / HOUR), 1 + 2 ** (-60 / (4 * HOUR))),
        ([*faults(0, reason="Killed"), *faults(30 / HOUR)], 2 ** (-30 / (4 * HOUR))),
        (faults(-299 / HOUR), 1.0),  # another leader's clock is ahead
        (faults(-301 / HOUR), 0.0),
        (faults(-10_000), 0.0),
    ],
)
def test_the_sum_of_the_faults_of_a_node_decays(listed: list[Fault], value: float) -> None:
    assert score(listed, NOW).value == pytest.approx(value, rel=1e-3)
    assert score(listed[::-1], NOW) == score(listed, NOW), "in any order"


@pytest.mark.parametrize(
    ("hours_ago", "is_excluded"),
    [
        ((), False),
        ((0,), False),
        ((0, 0.1), False),  # threshold - 1
        ((0, 0.5, 1), True),
        ((0, 0.98, 1), True),  # any three within an hour
        ((0.02, 0.04, 0), True),
        ((1, 1.5, 2), False),  # decayed
        (tuple(n / 10 for n in range(16)), True),
    ],
)
def test_three_faults_within_an_hour_exclude_a_node(
    hours_ago: tuple[float, ...], is_excluded: bool
) -> None:
    distrust = ordered({"a": score(faults(*hours_ago), NOW)}, NOW)
    assert bool(distrust.excluded([*"abcde"])) == is_excluded
    assert bool(distrust.avoided()) == bool(hours_ago), "from the first fault on"


def test_faults_before_the_creation_of_a_node_are_those_of_an_earlier_one() -> None:
    listed = faults(0, 2, 4)
    assert score(listed, NOW, created=NOW - HOUR).value == 1.0
    assert score(listed, NOW, created=NOW + HOUR).value == 0.0


def test_distrust_does_not_grow_while_the_clock_goes_back() -> None:
    distrust = Distrust({"a": score(faults(0, 0.1), NOW)}, NOW - 100 * HOUR)
    assert distrust.of("a") <= 2.0


@pytest.mark.parametrize("num_nodes", [0, 1, 4, 5, 9, 10, 500, 5000])
@pytest.mark.parametrize("num_distrusted", [0, 1, 3, 5000])
def test_only_a_part_of_the_nodes_is_excluded_the_worst_first(
    num_nodes: int, num_distrusted: int
) -> None:
    nodes = {f"n{number}" for number in range(num_nodes)}
    values = {f"n{n}": Score(10.0 + n, NOW, NOW) for n in range(num_distrusted)}
    distrust = ordered(values, NOW)
    excluded = distrust.excluded(nodes)
    most = min(MAX_EXCLUDED, num_nodes * EXCLUDED_PERCENT // 100)
    assert len(excluded) == min(most, num_distrusted, num_nodes)
    worst = [f"n{n}" for n in reversed(range(min(num_nodes, num_distrusted)))]
    assert list(excluded) == worst[: len(excluded)]
    assert len(distrust.avoided()) == min(MAX_AVOIDED, num_distrusted)


def test_forgotten_nodes_are_left_out() -> None:
    assert not ordered({"a": Score(1 / 17, NOW, NOW)}, NOW).scores
    assert not ordered({"a": Score(1.0, NOW, NOW)}, NOW + 16.1 * HOUR).scores
    assert Distrust().of("a") == 0.0


@pytest.mark.parametrize(
    ("before", "reason", "is_new"),
    [
        ((), LOST, False),
        ((0.1, 0.2), LOST, True),
        ((0.1, 0.2), "Killed", False),
        ((0.1, 0.2, 0.3), LOST, False),  # excluded already
        ((0.005, 0.2), LOST, False),  # the same fault, of another pod
    ],
)
def test_a_fault_that_excludes_a_node_is_known(
    before: tuple[float, ...], reason: str, is_new: bool
) -> None:
    distrust = ordered({"a": score(faults(*before), NOW)}, NOW)
    assert distrust.would_exclude(Fault("a", reason, NOW)) == is_new
    after = distrust.of("a") + (1.0 if reason == LOST else 0.5)
    assert not is_new or after >= EXCLUDED_FROM


GOOD = {"node": "a", "reason": LOST, "time": stamp(NOW), "pod": "u"}


@pytest.mark.parametrize(
    ("status", "count"),
    [
        (None, 0),
        ([], 0),
        ({}, 0),
        ({"nodeFaults": None}, 0),
        ({"nodeFaults": "many"}, 0),
        ({"nodeFaults": [GOOD]}, 1),
        ({"nodeFaults": [None, 3, "a", [], {}, GOOD]}, 1),
        ({"nodeFaults": [{**GOOD, "node": ""}, {**GOOD, "node": "a" * 254}, {**GOOD, "node": 1}]}, 0),
        ({"nodeFaults": [{**GOOD, "reason": "a" * 65}, {**GOOD, "reason": None}]}, 0),
        ({"nodeFaults": [{**GOOD, "time": "soon"}, {**GOOD, "time": 1}]}, 0),
        ({"nodeFaults": [{**GOOD, "more": {"of": "it"}}]}, 1),
        ({"nodeFaults": [GOOD] * 10_000}, 16),
    ],
)  # fmt: skip
def test_malformed_faults_of_a_status_are_left_out(status: Any, count: int) -> None:
    assert len(faults_of(status)) == count
