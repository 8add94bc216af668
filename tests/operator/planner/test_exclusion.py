"""Which nodes new pods exclude or avoid for their faults, and when that is lifted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.operator.planner.pods import (
    NOW,
    PENDING,
    created_pods,
    deleted,
    make_pod,
    plan_with,
    progress,
    running,
    started,
    with_status,
)

from fluxtrain_operator.base.job import Manifest
from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.base.node_health import Distrust, Score, ordered
from fluxtrain_operator.planner.guard import Reason
from fluxtrain_operator.planner.observed import NodeView, Pod
from fluxtrain_operator.planner.plan import Plan

NOTE = "fluxtrain.dev/distrusted-nodes"
NAMES = tuple(f"n{number}" for number in range(10))


def nodes(*names: str, **changes: Any) -> dict[str, NodeView]:
    return {name: NodeView(name, **changes) for name in names or NAMES}


def distrust(**values: float) -> Distrust:
    return ordered({name: Score(value, NOW, NOW) for name, value in values.items()}, NOW)


def replacement(result: Plan) -> Manifest:
    (pod,) = created_pods(result)
    return pod


def excluded(pod: Manifest) -> list[str]:
    affinity = pod["spec"]["affinity"].get("nodeAffinity", {})
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {})
    terms = required.get("nodeSelectorTerms", [{"matchExpressions": [{"values": []}]}])
    return list(terms[0]["matchExpressions"][-1]["values"])


def avoided(pod: Manifest) -> list[str]:
    affinity = pod["spec"]["affinity"].get("nodeAffinity", {})
    preferred = affinity.get("preferredDuringSchedulingIgnoredDuringExecution", [])
    return list(preferred[-1]["preference"]["matchExpressions"][0]["values"]) if preferred else []


@pytest.mark.parametrize(
    ("values", "hard", "soft"),
    [
        ({}, [], []),
        ({"n1": 0.05}, [], []),
        ({"n1": 1.0}, [], ["n1"]),
        ({"n1": 2.49}, [], ["n1"]),
        ({"n1": 2.5}, ["n1"], []),
        ({"n1": 3.0, "n2": 4.0, "n3": 5.0}, ["n2", "n3"], ["n1"]),  # a fifth of ten
        (dict.fromkeys(NAMES, 3.0), ["n0", "n1"], [*NAMES[2:]]),
        ({"gone": 9.0}, [], ["gone"]),
    ],
)
def test_new_pods_avoid_nodes_with_faults_and_exclude_the_worst(
    values: dict[str, float], hard: list[str], soft: list[str]
) -> None:
    state = plan_with(
        running(), make_pod(0), nodes=nodes(), distrust=distrust(**values), progress=progress()
    )
    pod = replacement(state)
    assert (excluded(pod), avoided(pod)) == (hard, soft)
    assert pod["metadata"]["annotations"].get(NOTE, "") == ",".join(hard)


@pytest.mark.parametrize(
    ("usable", "hard"),
    [
        (nodes(), ["n0"]),
        (nodes(*NAMES[:4]), []),  # none of fewer than five
        (nodes(*NAMES[:5]), ["n0"]),
        (nodes(*NAMES[:4]) | nodes(*NAMES[4:], ready=False), []),
        (nodes(*NAMES[:4]) | nodes(*NAMES[4:], cordoned=True), []),
        (nodes(*NAMES[:4]) | nodes(*NAMES[4:], gone=True, ready=False), []),
        (nodes(hostname="") | {"n0": NodeView("n0", hostname="host-0")}, ["host-0"]),
        ({}, []),
    ],
)
def test_the_part_is_one_of_the_nodes_that_the_job_could_run_on(
    usable: dict[str, NodeView], hard: list[str]
) -> None:
    result = plan_with(running(), make_pod(0), nodes=usable, distrust=distrust(n0=3.0))
    assert excluded(replacement(result)) == hard


def test_a_job_with_gpus_counts_nodes_with_gpus() -> None:
    job = running(gpusPerNode=8)
    few = nodes() | nodes("n0", "n1", "n2", has_gpus=True)
    for state, hard in ((few, []), (nodes(has_gpus=True), ["n0"])):
        result = plan_with(job, make_pod(0, job), nodes=state, distrust=distrust(n0=3.0))
        assert excluded(replacement(result)) == hard


def test_the_affinity_of_the_user_is_kept() -> None:
    zone = {"key": "zone", "operator": "In", "values": ["a"]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [zone]}, {"matchFields": []}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    job = running(podTemplate={"spec": {"affinity": affinity}})
    result = plan_with(job, make_pod(0, job), nodes=nodes(), distrust=distrust(n0=3.0))
    required = replacement(result)["spec"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]
    added = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["n0"]}
    assert [term["matchExpressions"] for term in required] == [[zone, added], [added]]


def test_jobs_in_queues_only_avoid_nodes() -> None:
    job = running(scheduling={"queueName": "team"})
    group = {"finalizers": ("kueue.x-k8s.io/managed",)}
    result = plan_with(job, make_pod(0, job, **group), nodes=nodes(), distrust=distrust(n0=3.0))
    pod = replacement(result)
    assert (excluded(pod), avoided(pod)) == ([], ["n0"])


def stuck(seconds: float = 120.0, **changes: Any) -> Pod:
    pod = make_pod(1, **PENDING, node="", excludes_nodes=True, created=NOW - seconds)
    return replace(pod, **{"waiting": "Unschedulable: 0/5 nodes are available", **changes})


@pytest.mark.parametrize(
    ("pod", "is_lifted"),
    [
        (stuck(), True),
        (stuck(119), False),
        (stuck(excludes_nodes=False), False),
        (stuck(waiting="SchedulingGated"), False),
        (stuck(waiting=""), False),
        (stuck(node="n1"), False),
        (stuck(deleting=True), False),
    ],
)
def test_a_pod_that_cannot_be_scheduled_elsewhere_is_replaced_by_one_that_only_avoids_nodes(
    pod: Pod, is_lifted: bool
) -> None:
    job = started()
    first = plan_with(job, make_pod(0), pod, nodes=nodes(), distrust=distrust(n0=3.0))
    assert [d.name for d in first.delete if d.reason is Reason.UNSCHEDULABLE] == [
        "job-1"
    ] * is_lifted
    assert first.status.exclusion_lifted == (stamp(NOW) if is_lifted else None)
    if not is_lifted:
        return
    job = with_status(job, first.status)
    second = replacement(plan_with(job, make_pod(0), nodes=nodes(), distrust=distrust(n0=3.0)))
    assert (excluded(second), avoided(second)) == ([], ["n0"])
    assert second["metadata"]["annotations"]["fluxtrain.dev/replacement"] == "0"
    unscheduled = stuck(5000, excludes_nodes=False)
    third = plan_with(job, make_pod(0), unscheduled, nodes=nodes(), distrust=distrust(n0=3.0))
    assert deleted(third) == [], "it waits like any other"


def test_the_job_is_planned_again_when_the_time_is_up() -> None:
    result = plan_with(started(), make_pod(0), stuck(50), nodes=nodes(), distrust=distrust(n0=3.0))
    assert result.requeue_after == pytest.approx(70.0)


@pytest.mark.parametrize(
    ("seconds_ago", "is_lifted"),
    [(0, True), (3599, True), (3600, False), (-10, True), (-3600, False)],
)
def test_an_exclusion_is_lifted_for_an_hour(seconds_ago: float, is_lifted: bool) -> None:
    job = running()
    lifted = {"exclusion_lifted": stamp(NOW - seconds_ago)}
    job = with_status(job, job.status.model_copy(update=lifted))
    result = plan_with(job, make_pod(0), nodes=nodes(), distrust=distrust(n0=3.0))
    assert excluded(replacement(result)) == ([] if is_lifted else ["n0"])
    assert (result.status.exclusion_lifted is not None) == is_lifted
