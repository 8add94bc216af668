"""A disruption budget exists only while a pod runs or is about to: else it counts as violated."""

from __future__ import annotations

from typing import Any

import pytest
from tests.operator.planner.pods import (
    NOW,
    PENDING,
    SUCCEEDED,
    failed,
    make_job,
    make_pod,
    make_pods,
    observe,
    plan_with,
    progress,
    running,
    started,
    with_status,
)

from fluxtrain_operator.base import names
from fluxtrain_operator.planner.observed import Observed, Pod
from fluxtrain_operator.planner.plan import Plan, plan
from fluxtrain_operator.resources import DISRUPTION_BUDGET

BUDGET = (DISRUPTION_BUDGET, "job-nodes")
GATED: dict[str, Any] = {**PENDING, "node": "", "gated": True, "gates": (names.KUEUE_GATE,)}
UNSCHEDULABLE: dict[str, Any] = {**PENDING, "node": "", "waiting": "Unschedulable: 0/9 nodes"}
QUEUED: dict[str, Any] = {"scheduling": {"queueName": "research"}}
SUSPEND: dict[str, Any] = {"lifecycle": {"suspend": True}}


def has_deleted(result: Plan) -> bool:
    return BUDGET in [(delete.kind, delete.name) for delete in result.delete]


def has_created(result: Plan) -> bool:
    return BUDGET in [(m["kind"], m["metadata"]["name"]) for m in result.create]


ROWS: list[tuple[str, dict[str, Any], list[Pod], bool]] = [
    ("no pod yet", {}, [], True),
    ("no pod yet, in a queue", QUEUED, [], False),
    ("all wait at a gate", {}, make_pods(**GATED), False),
    ("one has passed its gate", {}, [make_pod(0), make_pod(1, **GATED)], True),
    ("all are unschedulable", {}, make_pods(**UNSCHEDULABLE), False),
    ("one is scheduled", {}, [make_pod(0, **PENDING), make_pod(1, **UNSCHEDULABLE)], True),
    ("all are pending", {}, make_pods(**PENDING), True),
    ("all run", {}, make_pods(), True),
    ("all are being deleted", {}, make_pods(deleting=True), True),
    ("one was lost by its node", {}, [make_pod(0), failed(1, code=137)], True),
    ("suspended, and pods run", SUSPEND, make_pods(), False),
    ("suspended, without pods", SUSPEND, [], False),
    ("all have succeeded", {}, make_pods(**SUCCEEDED), False),
    ("the program cannot go on", {}, [failed(0, code=2), make_pod(1)], False),
    ("of fixed size", {"nodes": {"min": 2, "max": 2}}, make_pods(), False),
]


@pytest.mark.parametrize(
    ("spec", "pods", "needed"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
def test_a_budget_is_created_or_deleted(
    spec: dict[str, Any], pods: list[Pod], needed: bool
) -> None:
    job = make_job(started().status, **spec)
    applied = {**observe(job).applied, BUDGET: budget_hash()}
    with_budget = plan_with(job, *pods, progress=progress(), applied=applied)
    assert (has_created(with_budget), has_deleted(with_budget)) == (False, not needed)
    del applied[BUDGET]
    without = plan_with(job, *pods, progress=progress(), applied=applied)
    assert (has_created(without), has_deleted(without)) == (needed, False)


def budget_hash() -> str:
    """Return the hash of the budget of an elastic job of one or two nodes."""
    return observe(make_job()).applied[BUDGET]


def test_a_finished_or_suspended_job_of_an_older_operator_loses_its_budget() -> None:
    finished = running()
    finished = with_status(finished, plan_with(finished, failed(0, code=2)).status)
    suspended = make_job(running().status, **SUSPEND)
    suspended = with_status(suspended, plan_with(suspended, rendezvous=None).status)
    assert (finished.status.phase, suspended.status.phase) == ("Failed", "Suspended")
    for job in (finished, suspended):
        result = plan_with(job, rendezvous=None)
        assert [(delete.kind, delete.name) for delete in result.delete] == [BUDGET]
        later = plan(job, Observed(), NOW)
        assert (later.delete, later.create) == ((), ())


def test_a_resumed_job_has_its_budget_again() -> None:
    suspended = make_job(running().status, **SUSPEND)
    suspended = with_status(suspended, plan_with(suspended, rendezvous=None).status)
    resumed = make_job(suspended.status)
    assert has_created(plan(resumed, Observed(), NOW))
