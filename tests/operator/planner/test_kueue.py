"""Jobs in a queue of Kueue: when a pod is replaced in its group, and when all are queued as another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.operator.planner.test_plan import (
    NOW,
    created,
    deleted,
    failed,
    lost,
    make_pod,
    observe,
    progress,
    running,
    with_status,
)

from fluxtrain_operator import names
from fluxtrain_operator.planner.plan import Plan, plan

QUEUE = {"scheduling": {"queueName": "team"}}
EVICTED: dict[str, Any] = {"deleting": True, "deletion_deadline": NOW + 170, "queued": True}
AT_THE_GATE: dict[str, Any] = {
    "phase": "Pending",
    "started": None,
    "node": "",
    "ready": False,
    "gated": True,
    "gates": (names.KUEUE_GATE,),
}


def groups(result: Plan) -> set[str]:
    """Return Kueue's names of the groups of new training pods."""
    pods = (m["metadata"]["labels"] for m in result.create if m["kind"] == "Pod")
    return {labels[names.KUEUE_GROUP] for labels in pods if names.KUEUE_GROUP in labels}


def test_pods_that_kueue_sent_away_are_queued_anew_as_another_group() -> None:
    job = running(**QUEUE)
    going = make_pod(0, job, **EVICTED), make_pod(1, job, **EVICTED)
    result = plan(job, observe(*going, job=job), NOW)
    assert (result.status.phase, result.status.attempt) == ("Restarting", 2)
    assert (deleted(result), created(result)) == ([], []), "they leave a checkpoint, and have names"
    assert [(e.type, e.reason) for e in result.events] == [("Normal", "GroupEnded")]
    again = plan(with_status(job, result.status), observe(job=job), NOW + 20)
    assert (created(again), groups(again)) == (["job-0", "job-1"], {"job-2"})
    assert again.status.restarts == job.status.restarts, "an eviction is nobody's fault"


def test_a_pod_that_kueue_holds_back_is_replaced_under_another_name() -> None:
    job = running(**QUEUE)
    ended = failed(1, 75, **EVICTED, job=job)
    result = plan(job, observe(make_pod(0, job, queued=True), ended, job=job), NOW)
    assert (created(result), groups(result)) == (["job-2"], {"job-1"})
    assert result.status.attempt == 1
    at_the_gate = make_pod(1, job, **{**AT_THE_GATE, **EVICTED})
    both = observe(make_pod(0, job, queued=True), at_the_gate, job=job)
    assert created(plan(job, both, NOW)) == ["job-2"], "nobody will ever start it"


def test_a_lost_nodes_pod_keeps_its_place_in_kueues_group() -> None:
    job = running(**QUEUE)
    pods = [make_pod(i, job, queued=True) for i in range(2)]
    result = plan(job, observe(*pods, job=job, nodes=lost("node-1"), progress=progress()), NOW)
    assert created(result) == [], "Kueue would delete it as one too many"
    drained = make_pod(1, job, **EVICTED, phase="Succeeded", exit_code=0, finished=NOW)
    others = observe(pods[0], drained, job=job, progress=progress())
    assert created(plan(job, others, NOW)) == [], "for Kueue it is done"
    all_lost = observe(*pods, job=job, nodes=lost("node-0", "node-1"))
    assert groups(plan(job, all_lost, NOW)) == {"job-2"}


def test_a_queued_job_of_fixed_size_that_loses_a_node_is_queued_as_another_group() -> None:
    job = running(nodes={"min": 2, "max": 2}, **QUEUE)
    pods = [make_pod(i, job, queued=True) for i in range(2)]
    nodes = lost("node-1")
    result = plan(job, observe(*pods, job=job, nodes=nodes, progress=progress()), NOW)
    assert (deleted(result), groups(result)) == (["job-0", "job-1"], {"job-2"})
    assert (created(result), result.status.restarts) == (["job-2"], job.status.restarts)
    ended = failed(0, 75, **EVICTED, job=job)
    lost_one = replace(pods[1], deleting=True, deletion_deadline=NOW + 180)
    new = make_pod(2, job, attempt=2, **{**AT_THE_GATE, "queued": True})
    after = observe(ended, lost_one, new, job=job, nodes=nodes)
    again = plan(with_status(job, result.status), after, NOW)
    assert created(again) == ["job-3"], "Kueue holds job-0 back as long as it counts job-1"


def test_a_pod_that_came_too_late_for_its_group_is_queued_anew() -> None:
    job = running(**QUEUE)
    late = make_pod(2, job, **AT_THE_GATE)
    result = plan(job, observe(late, job=job), NOW)
    assert (deleted(result), created(result), groups(result)) == (
        ["job-2"],
        ["job-0", "job-1"],
        {"job-2"},
    )
    waiting = replace(late, queued=True)
    assert plan(job, observe(waiting, job=job), NOW).status.attempt == 1


def test_the_last_pod_of_a_group_has_its_pause_before_it_is_queued_anew() -> None:
    job = running(1, nodes={"min": 1, "max": 1}, **QUEUE)
    young = failed(0, 137, job=job, started=NOW - 3)
    result = plan(job, observe(young, job=job), NOW)
    assert (deleted(result), created(result), result.status.attempt) == ([], [], 1)
    assert result.requeue_after == pytest.approx(9.0)
    later = plan(job, observe(young, job=job), NOW + 10)
    assert (later.status.attempt, later.status.restarts) == (2, job.status.restarts)
    assert deleted(later) == ["job-0"]


def test_pods_in_no_queue_are_replaced_one_by_one() -> None:
    job = running()
    going = [make_pod(i, job, deleting=True, deletion_deadline=NOW + 170) for i in range(2)]
    assert plan(job, observe(*going, job=job), NOW).status.attempt == 1
