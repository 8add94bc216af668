"""Pod groups of gang schedulers: what a job waits for, and how its group follows nodes and restarts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.operator.planner.pods import (
    NOW,
    condition,
    created,
    created_pods,
    deleted,
    failed,
    make_job,
    make_pods,
    message,
    observe,
    plan_with,
    progress,
    running,
    with_status,
)

from fluxtrain_operator.base.job import Job, Manifest
from fluxtrain_operator.planner.observed import NO_POD_GROUPS, CreateFailure, Observed, no_pod_group
from fluxtrain_operator.planner.plan import Plan, plan
from fluxtrain_operator.resources.scheduling import GroupState, gang_of, group_state

GANGS = ("Coscheduling", "Volcano", "Native")
WHY = "the cluster does not serve PodGroup"


def in_gang(gang: str, **spec: Any) -> Job:
    return make_job(scheduling={"gang": gang}, **spec)


def trains(gang: str, count: int = 2, **spec: Any) -> Job:
    return running(count, scheduling={"gang": gang}, **spec)


def not_served(job: Job) -> tuple[CreateFailure, ...]:
    objects = gang_of(job).objects(job)
    return tuple(replace(no_pod_group(m, WHY), retry_time=NOW + 30) for m in objects)


def groups(result: Plan) -> list[Manifest]:
    return [manifest for manifest in result.create if manifest["kind"] == "PodGroup"]


def minimum(group: Manifest) -> int:
    """Return how many pods the scheduler of ``group`` starts together."""
    policy = group["spec"].get("schedulingPolicy", {"gang": {}})
    return int(policy["gang"].get("minCount") or group["spec"]["minMember"])


@pytest.mark.parametrize("gang", GANGS)
def test_a_job_whose_scheduler_has_no_api_waits_without_any_pod(gang: str) -> None:
    job = in_gang(gang)
    result = plan(job, Observed(create_failures=not_served(job)), NOW)
    assert (created_pods(result), groups(result)) == ([], [])
    assert condition(result.status, "Admitted") == ("False", NO_POD_GROUPS)
    assert WHY in message(result.status, "Admitted")
    assert f"{gang_of(job).api_version}, but" in message(result.status, "Admitted")
    assert (result.status.phase, result.status.start_time) == ("Pending", None)
    assert result.requeue_after == 30
    assert NO_POD_GROUPS in [event.reason for event in result.events]


@pytest.mark.parametrize("gang", GANGS)
def test_a_job_whose_scheduler_loses_its_api_trains_on_and_replaces_no_pod(gang: str) -> None:
    job = trains(gang, nodes={"min": 1, "max": 2})
    pod, _ = make_pods(2, job)
    result = plan_with(job, pod, progress=progress(), create_failures=not_served(job))
    assert (result.status.phase, created(result)) == ("Running", [])
    assert condition(result.status, "Admitted") == ("True", "Admitted")
    assert condition(result.status, "Healthy") == ("False", NO_POD_GROUPS)
    assert created(plan_with(job, pod, progress=progress())) == ["job-1"], "once it is back"


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (GroupState(), "Volcano's scheduler has not seen the pod group job-gang"),
        (GroupState("Pending"), "the pod group job-gang waits in Volcano's queue team: Pending"),
        (GroupState("Pending", "NotEnoughResources: 2 GPUs"), "team: NotEnoughResources: 2 GPUs"),
        (GroupState("Inqueue"), ""),
        (GroupState("Running"), ""),
        (GroupState("Unknown"), ""),
        (GroupState("Completed"), ""),
    ],
)
def test_a_job_in_volcanos_queue_is_admitted_once_its_group_is(
    state: GroupState, text: str
) -> None:
    job = make_job(scheduling={"gang": "Volcano", "queueName": "team"})
    waiting = make_pods(2, job, phase="Pending", node="", started=None, ready=False)
    status = plan_with(job, *waiting, group_state=state).status
    expected = ("False", "PodGroupPending") if text else ("True", "Admitted")
    assert condition(status, "Admitted") == expected
    assert message(status, "Admitted").endswith(text)
    assert (status.start_time is None) is bool(text), "time in a queue does not count"


def test_pods_that_run_are_admitted_whatever_their_group_reports() -> None:
    job = trains("Volcano")
    status = plan_with(job, *make_pods(2, job), progress=progress()).status
    assert condition(status, "Admitted") == ("True", "Admitted")


def test_volcanos_queue_is_none_of_kueues() -> None:
    job = make_job(scheduling={"gang": "Volcano", "queueName": "team"})
    result = plan(job, Observed(), NOW)
    (group,) = groups(result)
    assert group["spec"]["queue"] == "team"
    for pod in created_pods(result):
        assert not [k for k in pod["metadata"]["labels"] if k.startswith("kueue")]
        assert not [k for k in pod["metadata"]["annotations"] if k.startswith("kueue")]


def test_fields_of_volcanos_group_that_the_job_gives_up_are_reset_by_the_merge_patch() -> None:
    (group,) = groups(plan(in_gang("Volcano"), Observed(), NOW))
    spec = group["spec"]
    assert (spec["queue"], spec["priorityClassName"]) == ("default", "")


@pytest.mark.parametrize(
    ("status", "state"),
    [
        (None, GroupState()),
        ({}, GroupState()),
        ({"phase": "Inqueue", "conditions": "x"}, GroupState("Inqueue")),
        ({"phase": "Pending", "conditions": [None, {}]}, GroupState("Pending")),
        (
            {
                "phase": "Pending",
                "conditions": [
                    {"type": "Scheduled", "status": "True", "message": "pod group is ready"},
                    {"type": "Unschedulable", "status": "False", "message": "no more"},
                    {
                        "type": "Unschedulable",
                        "status": "True",
                        "reason": "NotEnoughResources",
                        "message": "queue team has no room",
                        "lastTransitionTime": "2026-01-02T00:00:00Z",
                    },
                    {
                        "type": "Unschedulable",
                        "status": "True",
                        "message": "older",
                        "lastTransitionTime": "2026-01-01T00:00:00Z",
                    },
                ],
            },
            GroupState("Pending", "NotEnoughResources: queue team has no room"),
        ),
    ],
)
def test_the_state_of_a_group(status: Any, state: GroupState) -> None:
    assert group_state({"metadata": {}, "status": status}) == state


@pytest.mark.parametrize("gang", GANGS)
def test_the_minimum_of_a_group_follows_the_nodes_and_no_pod_restarts(gang: str) -> None:
    before = trains(gang, nodes={"min": 2, "max": 2})
    pods, applied = make_pods(2, before), observe(before).applied
    job = with_status(in_gang(gang, nodes={"min": 3, "max": 4}), before.status)
    result = plan_with(job, *pods, progress=progress(), applied=applied)
    assert list(map(minimum, groups(result))) == [3]
    assert (created(result), deleted(result)) == (["job-2", "job-3"], [])


@pytest.mark.parametrize("gang", GANGS)
def test_excess_pods_leave_and_the_group_stays(gang: str) -> None:
    before = trains(gang, 4, nodes={"min": 2, "max": 4})
    job = with_status(in_gang(gang, nodes={"min": 2, "max": 3}), before.status)
    result = plan_with(
        job, *make_pods(4, before), progress=progress(), applied=observe(before).applied
    )
    assert deleted(result)[0] == "job-3"
    assert (result.status.attempt, groups(result)) == (1, [])


@pytest.mark.parametrize("gang", GANGS)
def test_a_restart_of_all_pods_keeps_the_group(gang: str) -> None:
    job = trains(gang)
    result = plan_with(job, *(failed(index, 1, job) for index in (0, 1)))
    assert (result.status.attempt, groups(result)) == (2, [])
    assert not [deletion for deletion in result.delete if deletion.kind != "Pod"]
    again = plan_with(with_status(job, result.status))
    assert created(again)[:2] == ["job-0", "job-1"]
    assert groups(again) == []


@pytest.mark.parametrize("gang", GANGS)
def test_a_group_that_somebody_has_deleted_is_created_before_the_next_pod(gang: str) -> None:
    job = trains(gang)
    applied = {k: v for k, v in observe(job).applied.items() if k[0] != "PodGroup"}
    result = plan_with(job, make_pods(2, job)[0], progress=progress(), applied=applied)
    kinds = [manifest["kind"] for manifest in result.create]
    assert kinds.index("PodGroup") < kinds.index("Pod")
