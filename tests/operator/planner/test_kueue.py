"""Jobs in a Kueue queue: when a pod is replaced in its group, and when all are queued as another group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.operator.planner.pods import (
    NOW,
    PENDING,
    SUCCEEDED,
    causes,
    charged_and_free,
    created,
    created_pods,
    deleted,
    failed,
    lost,
    make_pod,
    make_pods,
    plan_with,
    progress,
    running,
    with_status,
)

from fluxtrain_operator import names
from fluxtrain_operator.planner.plan import Plan

QUEUE = {"scheduling": {"queueName": "team"}}
MANAGED: dict[str, Any] = {"finalizers": (names.KUEUE_FINALIZER,)}
EVICTED: dict[str, Any] = {"deleting": True, "deletion_deadline": NOW + 170, **MANAGED}
GATED: dict[str, Any] = {**PENDING, "node": "", "gated": True, "gates": (names.KUEUE_GATE,)}


def groups(result: Plan) -> set[str]:
    """Return the Kueue groups of the created training pods."""
    labels = (pod["metadata"]["labels"] for pod in created_pods(result))
    return {pod[names.KUEUE_GROUP] for pod in labels if names.KUEUE_GROUP in pod}


def test_evicted_pods_are_queued_again_as_another_group() -> None:
    job = running(**QUEUE)
    result = plan_with(job, *make_pods(2, job, **EVICTED))
    assert (result.status.phase, result.status.attempt) == ("Restarting", 2)
    assert (deleted(result), created(result)) == ([], []), "they write a checkpoint first"
    assert [(e.type, e.reason) for e in result.events] == [("Normal", "GroupEnded")]
    again = plan_with(with_status(job, result.status), now=NOW + 20)
    assert (created(again), groups(again)) == (["job-0", "job-1"], {"job-2"})
    assert charged_and_free(again.status) == (0, 1), "an eviction uses no restart"
    assert causes(again.status) == {"GroupEnded": 1}


def test_a_pod_whose_object_kueue_keeps_is_replaced_under_another_name() -> None:
    job = running(**QUEUE)
    active = make_pod(0, job, **MANAGED)
    result = plan_with(job, active, failed(1, 75, job, **EVICTED))
    assert (created(result), groups(result)) == (["job-2"], {"job-1"})
    assert result.status.attempt == 1
    never_scheduled = make_pod(1, job, **{**GATED, **EVICTED})
    assert created(plan_with(job, active, never_scheduled)) == ["job-2"]


def test_the_pod_of_a_lost_node_stays_a_member_of_its_group() -> None:
    job = running(**QUEUE)
    pods = make_pods(2, job, **MANAGED)
    result = plan_with(job, *pods, nodes=lost("node-1"), progress=progress())
    assert created(result) == [], "Kueue would delete it as an excess pod"
    drained = make_pod(1, job, **EVICTED, **SUCCEEDED)
    result = plan_with(job, pods[0], drained, progress=progress())
    assert created(result) == [], "for Kueue it has succeeded"
    assert groups(plan_with(job, *pods, nodes=lost("node-0", "node-1"))) == {"job-2"}


def test_a_job_of_fixed_size_that_loses_a_node_is_queued_as_another_group() -> None:
    job = running(nodes={"min": 2, "max": 2}, **QUEUE)
    pods, nodes = make_pods(2, job, **MANAGED), lost("node-1")
    result = plan_with(job, *pods, nodes=nodes, progress=progress())
    assert (deleted(result), groups(result)) == (["job-0", "job-1"], {"job-2"})
    assert (created(result), charged_and_free(result.status)) == (["job-2"], (0, 1))
    ended = failed(0, 75, job, **EVICTED)
    lost_pod = replace(pods[1], deleting=True, deletion_deadline=NOW + 180)
    new = make_pod(2, job, attempt=2, **GATED, **MANAGED)
    again = plan_with(with_status(job, result.status), ended, lost_pod, new, nodes=nodes)
    assert created(again) == ["job-3"], "Kueue keeps job-0 as long as job-1 is a member"


def test_a_pod_that_was_created_after_its_group_ended_is_queued_again() -> None:
    job = running(**QUEUE)
    late = make_pod(2, job, **GATED)
    result = plan_with(job, late)
    assert deleted(result) == ["job-2"]
    assert (created(result), groups(result)) == (["job-0", "job-1"], {"job-2"})
    assert plan_with(job, replace(late, **MANAGED)).status.attempt == 1


def test_a_short_lived_last_pod_of_a_group_delays_the_next_group() -> None:
    job = running(1, nodes={"min": 1, "max": 1}, **QUEUE)
    pod = failed(0, 137, job, started=NOW - 3)
    result = plan_with(job, pod)
    assert (deleted(result), created(result), result.status.attempt) == ([], [], 1)
    assert result.requeue_after == pytest.approx(9.0)
    later = plan_with(job, pod, now=NOW + 10)
    assert (later.status.attempt, charged_and_free(later.status)) == (2, (0, 1))
    assert deleted(later) == ["job-0"]


def test_pods_without_a_queue_are_replaced_one_by_one() -> None:
    job = running()
    pods = make_pods(2, job, deleting=True, deletion_deadline=NOW + 170)
    assert plan_with(job, *pods).status.attempt == 1
