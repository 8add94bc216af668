"""Faults of nodes disrupt a bounded part of all pods per minute."""

from __future__ import annotations

import pytest

from fluxtrain_operator.controller.executor import MIN_PODS, FaultBudget
from fluxtrain_operator.planner.guard import NODE_FAULTS, Delete, Reason


def deletions(count: int, reason: Reason = Reason.NODE_LOST, first: int = 0) -> list[Delete]:
    return [
        Delete("Pod", f"job-{n}", f"uid-{n}", None, reason) for n in range(first, first + count)
    ]


@pytest.mark.parametrize(
    ("percent", "num_pods", "left"),
    [(10, 0, 8), (10, 1, 8), (10, 80, 8), (10, 89, 8), (10, 90, 9), (10, 8000, 800), (100, 64, 64)],
)
def test_a_part_of_all_pods_may_be_replaced_per_minute(
    percent: int, num_pods: int, left: int
) -> None:
    assert FaultBudget(percent).left(num_pods, 0.0) == left
    assert left >= MIN_PODS


def test_each_pod_counts_once_and_for_a_minute() -> None:
    budget = FaultBudget(10)
    budget.record(deletions(5), 100.0)
    budget.record(deletions(6), 130.0)  # five of them again, as the plan was refused
    assert budget.left(80, 130.0) == 2
    assert budget.left(80, 159.9) == 2
    assert budget.left(80, 160.0) == 7
    assert budget.left(80, 190.0) == 8
    budget.record(deletions(20, first=100), 200.0)
    assert budget.left(80, 200.0) == 0


@pytest.mark.parametrize("reason", sorted(set(Reason) - NODE_FAULTS))
def test_only_faults_of_nodes_count(reason: Reason) -> None:
    budget = FaultBudget(10)
    budget.record([*deletions(8, reason), Delete("ConfigMap", "job-config")], 0.0)
    assert budget.left(0, 0.0) == 8
