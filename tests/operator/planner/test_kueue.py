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
    condition,
    created,
    created_pods,
    deleted,
    failed,
    lost,
    make_job,
    make_pod,
    make_pods,
    message,
    num_gang_restarts,
    plan_with,
    progress,
    running,
    started,
    with_status,
)

from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Job
from fluxtrain_operator.base.reports import Progress, RankProgress
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


def test_a_job_of_fixed_size_that_loses_a_node_keeps_its_group_until_the_place_is_free() -> None:
    job = running(nodes={"min": 2, "max": 2}, **QUEUE)
    pods, nodes = make_pods(2, job, **MANAGED), lost("node-1")
    result = plan_with(job, *pods, nodes=nodes, progress=progress())
    assert (deleted(result), created(result), result.status.attempt) == (["job-1"], [], 1)
    assert condition(result.status, "Ready") == ("False", "GroupWaits")
    stuck = replace(pods[1], deleting=True, deletion_deadline=NOW + 180)
    waiting = plan_with(with_status(job, result.status), pods[0], stuck, nodes=nodes)
    assert (deleted(waiting), created(waiting), waiting.status.attempt) == ([], [], 1)
    assert "until 2027-01-15T08:08:00Z for the places of job-1" in message(waiting.status, "Ready")
    ended = failed(1, None, job, **EVICTED)  # the node is removed, and its pod with it
    freed = plan_with(with_status(job, waiting.status), pods[0], ended, now=NOW + 200)
    assert (created(freed), groups(freed), freed.status.attempt) == (["job-2"], {"job-1"}, 1)


def test_a_job_of_fixed_size_whose_lost_node_stays_away_is_queued_as_another_group() -> None:
    job = running(nodes={"min": 2, "max": 2}, **QUEUE)
    nodes = lost("node-1")
    stuck = make_pod(1, job, deleting=True, deletion_deadline=NOW - 300, **MANAGED)
    pods = [make_pod(0, job, **MANAGED), stuck]
    result = plan_with(job, *pods, nodes=nodes, progress=progress())
    assert (deleted(result), groups(result)) == (["job-0"], {"job-2"})
    assert (created(result), charged_and_free(result.status)) == (["job-2"], (0, 1))
    ended = failed(0, 75, job, **EVICTED)
    new = make_pod(2, job, attempt=2, **GATED, **MANAGED)
    again = plan_with(with_status(job, result.status), ended, stuck, new, nodes=nodes)
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


STALLED = Progress(
    progress(3600).status,
    phase="step",
    ranks=(RankProgress(0, "step", 7, 3600.0, 1.0),),  # without a generation: of older trainers
)


def restart_all(job: Job, num_pods: int, **changes: Any) -> Plan:
    """Return the plan of a job in a group that has stalled."""
    pods = make_pods(num_pods, job, **MANAGED)
    return plan_with(job, *pods, progress=STALLED, any_progress=STALLED, **changes)


def test_a_restart_of_all_pods_keeps_the_group_one_pod_at_a_time() -> None:
    job = running(3, nodes={"min": 3, "max": 3}, **QUEUE)
    result = restart_all(job, 3)
    assert (result.status.attempt, result.status.group_attempt) == (2, 1)
    assert (deleted(result), created(result)) == (["job-1", "job-2"], []), "one pod is kept"
    job = with_status(job, result.status)
    kept, leaving = make_pod(0, job, **MANAGED), make_pod(2, job, **EVICTED)
    ended = failed(1, 143, job, **EVICTED)
    first = plan_with(job, kept, ended, leaving)
    assert (deleted(first), created(first), groups(first)) == ([], ["job-3"], {"job-1"})
    job = with_status(job, first.status)
    new = make_pod(3, job, attempt=2, **GATED, **MANAGED)
    second = plan_with(job, kept, leaving, new)
    (last,) = second.delete
    assert (last.name, last.reason, last.grace_seconds) == ("job-0", "PreviousAttempt", 30)
    assert created(second) == [], "for Kueue two pods of the earlier attempt run"
    job = with_status(job, second.status)
    ended = [failed(index, 143, job, **EVICTED) for index in (0, 2)]
    third = plan_with(job, *ended, new)
    assert (created(third), groups(third)) == (["job-1", "job-4"], {"job-1"})
    assert (third.status.attempt, third.status.group_attempt) == (2, 1)
    assert num_gang_restarts(third.status) == 1


def test_a_failure_of_the_program_in_many_pods_keeps_the_group() -> None:
    job = running(4, nodes={"min": 1, "max": 4}, **QUEUE)
    bad = [failed(index, 1, job, **MANAGED) for index in (0, 1)]
    good = [make_pod(index, job, **MANAGED) for index in (2, 3)]
    result = plan_with(job, *bad, *good, progress=progress())
    assert (result.status.attempt, result.status.group_attempt) == (2, 1)
    assert (deleted(result), created(result)) == (["job-0", "job-1", "job-3"], [])
    bad = [replace(pod, **EVICTED) for pod in bad]
    again = plan_with(with_status(job, result.status), *bad, good[0], replace(good[1], **EVICTED))
    assert (created(again), groups(again)) == (["job-4", "job-5"], {"job-1"})


@pytest.mark.parametrize("nodes", [{"min": 1, "max": 1}, {"min": 1, "max": 2}])
def test_a_group_without_a_place_for_a_second_pod_is_given_up(nodes: dict[str, int]) -> None:
    """A job of one node; or of two, one of which is lost."""
    job = running(nodes["max"], nodes=nodes, **QUEUE)
    lost_nodes = lost("node-1") if nodes["max"] > 1 else {}
    pods = make_pods(nodes["max"], job, **MANAGED)
    failure = failed(0, 3, job, **MANAGED)
    assert plan_with(job, failure, *pods[1:]).status.phase == "Failed"
    stuck = [replace(pod, deleting=True, deletion_deadline=NOW - 700) for pod in pods[1:]]
    result = plan_with(
        job, pods[0], *stuck, progress=STALLED, any_progress=STALLED, nodes=lost_nodes
    )
    assert (result.status.attempt, result.status.group_attempt) == (2, None)
    assert deleted(result)[0] == "job-0"


@pytest.mark.parametrize("change", [{"nodes": {"min": 1, "max": 3}}, {"image": "trainer:2"}])
def test_pods_of_another_size_or_spec_never_join_the_kept_group(change: dict[str, Any]) -> None:
    job = running(2, nodes={"min": 1, "max": 2}, **QUEUE)
    result = restart_all(job, 2)
    assert (result.status.group_attempt, created(result)) == (1, [])
    changed = with_status(make_job(**{"nodes": {"min": 1, "max": 2}, **QUEUE, **change}), None)
    again = plan_with(with_status(changed, result.status), *make_pods(2, job, **MANAGED))
    assert (again.status.attempt, again.status.group_attempt) == (3, None)
    assert groups(again) <= {"job-3"}


def test_a_new_pod_that_fails_while_earlier_ones_leave_does_not_end_the_group() -> None:
    job = running(3, nodes={"min": 3, "max": 3}, **QUEUE)
    job = with_status(job, restart_all(job, 3).status)
    leaving = [make_pod(index, job, **EVICTED) for index in (0, 2)]
    rejected = failed(3, None, job, attempt=2, reason="PodLost", **MANAGED)
    result = plan_with(job, *leaving, rejected, now=NOW + 60)
    assert (result.status.attempt, result.status.group_attempt) == (2, 1)
    assert deleted(result) == ["job-3"]
    again = plan_with(with_status(job, result.status), replace(rejected, **EVICTED))
    assert (again.status.attempt, groups(again)) == (3, {"job-3"}), "Kueue has ended it"


def test_the_kept_pod_goes_if_no_place_will_be_free_before_its_own() -> None:
    job = running(2, nodes={"min": 1, "max": 2}, **QUEUE)
    job = with_status(job, restart_all(job, 2).status)
    stuck = make_pod(1, job, deleting=True, deletion_deadline=NOW + 30, **MANAGED)
    result = plan_with(job, make_pod(0, job, **MANAGED), stuck, nodes=lost("node-1"))
    assert deleted(result) == ["job-0"]


def test_a_restart_without_kueue_keeps_no_pod() -> None:
    """Nor if Kueue, which sets the finalizer, does not run."""
    job = running(2, **QUEUE)
    pods = make_pods(2, job)
    result = plan_with(job, *pods, progress=STALLED, any_progress=STALLED)
    assert deleted(result) == ["job-0", "job-1"]


def test_pods_of_a_job_that_allows_force_tell_kueue_so() -> None:
    notes = {
        allows: created_pods(plan_with(started(restart=allowed, **QUEUE)))[0]["metadata"]
        for allows, allowed in ((True, {"forceDeleteOnLostNode": True}), (False, {}))
    }
    assert notes[True]["annotations"][names.KUEUE_FORCE] == "true"
    assert names.KUEUE_FORCE not in notes[False]["annotations"]


def test_pods_without_a_queue_are_replaced_one_by_one() -> None:
    job = running()
    pods = make_pods(2, job, deleting=True, deletion_deadline=NOW + 170)
    assert plan_with(job, *pods).status.attempt == 1
