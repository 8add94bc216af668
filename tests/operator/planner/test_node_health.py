"""Nodes that are not ready: lost or only unheard of, told apart by what the trainers say."""

from __future__ import annotations

import pytest
from tests.operator.planner.test_plan import (
    NOW,
    created,
    deleted,
    make_pod,
    observe,
    progress,
    running,
    says,
)

from fluxtrain_operator.planner.observed import NodeView
from fluxtrain_operator.planner.plan import plan

NAMES = ("node-0", "node-1", "node-s", "spare-0", "spare-1")
BAD_GPU = "GPU 3 is unhealthy"


def nodes(*out: str, seconds_ago: float = 60.0) -> dict[str, NodeView]:
    """Return five nodes of which ``out`` are not ready since ``seconds_ago``."""
    since = NOW - seconds_ago
    return {name: NodeView(name, ready=name not in out, since=since) for name in NAMES}


@pytest.mark.parametrize(
    ("seconds_out", "num_nodes", "sign_ago", "is_lost"),
    [
        (60, 2, 5, False),  # both train together, five seconds ago
        (60, 2, 61, True),  # too long ago to say
        (5, 2, 61, False),  # but a node has some time to come back
        (5, 1, 5, True),  # the others go on without it: no need to wait
        (21, None, 5, True),  # an older trainer does not say how many there are
        (19, None, 5, False),
        (60, 3, 5, False),
    ],
)
def test_a_node_is_lost_when_training_goes_on_without_it_or_stops(
    seconds_out: float, num_nodes: int | None, sign_ago: float, is_lost: bool
) -> None:
    job, pods = running(), (make_pod(0), make_pod(1))
    said = progress(sign_ago, num_nodes=num_nodes)
    picture = observe(*pods, nodes=nodes("node-1", seconds_ago=seconds_out), progress=said)
    result = plan(job, picture, NOW)
    assert deleted(result) == (["job-1"] if is_lost else [])
    reason = "NodeLost" if is_lost else "NodeNotReady"
    assert says(result.status, "Healthy") == ("False", reason)
    if not is_lost:
        assert result.requeue_after is not None
        assert result.requeue_after <= 60


def test_while_as_many_train_as_run_nothing_is_given_up_whoever_they_are() -> None:
    job = running(nodes={"min": 1, "max": 2})
    going = make_pod(2, job, deleting=True, deletion_deadline=NOW + 100, node="spare-0")
    pods = make_pod(0, job), make_pod(1, job), going
    out = nodes("node-1", "spare-0")
    for num_nodes, lost in ((3, []), (2, []), (1, ["job-1"])):
        said = progress(num_nodes=num_nodes)
        result = plan(job, observe(*pods, job=job, nodes=out, progress=said), NOW)
        assert deleted(result) == lost


@pytest.mark.parametrize("sign_ago", [5, 3000])
@pytest.mark.parametrize("out", [NAMES, NAMES[:3], ("node-1", "spare-0", "spare-1")])
def test_while_most_nodes_are_out_at_once_nothing_is_deleted(
    out: tuple[str, ...], sign_ago: float
) -> None:
    job = running(restart={"forceDeleteOnLostNode": True, "noProgressSeconds": 86_400})
    pods = make_pod(0, job), make_pod(1, job)
    for said in (progress(sign_ago), None):
        picture = observe(*pods, job=job, nodes=nodes(*out), progress=said)
        result = plan(job, picture, NOW)
        assert (deleted(result), created(result), result.status.attempt) == ([], [], 1)
        assert says(result.status, "Healthy") == ("False", "NodesUnknown")
        assert [event.reason for event in result.events] == ["NodesUnknown"]
        assert result.requeue_after == 20, "what other nodes do is no event of the job"


def test_nodes_that_have_been_out_for_hours_say_nothing_of_the_control_plane() -> None:
    job, pods = running(), (make_pod(0), make_pod(1))
    old = {f"old-{n}": NodeView(f"old-{n}", ready=False, since=NOW - 7200) for n in range(90)}
    picture = observe(*pods, nodes=nodes("node-1") | old, progress=progress(num_nodes=1))
    assert deleted(plan(job, picture, NOW)) == ["job-1"]


def test_a_node_that_was_deleted_is_lost_whatever_else_is() -> None:
    job, pods = running(), (make_pod(0), make_pod(1))
    gone = {"node-1": NodeView("node-1", ready=False, gone=True)}
    picture = observe(*pods, nodes=nodes(*NAMES) | gone, progress=progress(num_nodes=2))
    assert deleted(plan(job, picture, NOW)) == ["job-1"]


def test_the_store_stays_on_a_node_that_is_not_ready_while_training_goes_on() -> None:
    job, pods = running(), (make_pod(0), make_pod(1))
    picture = observe(*pods, nodes=nodes("node-s"), progress=progress(num_nodes=2))
    assert deleted(plan(job, picture, NOW)) == []
    alone = observe(*pods, nodes=nodes("node-s"))
    assert deleted(plan(job, alone, NOW)) == ["job-rendezvous"]


@pytest.mark.parametrize(
    ("unhealthy", "is_believed"), [(("node-1",), True), (NAMES, False), (NAMES[:3], False)]
)
def test_unhealthy_gpus_are_not_believed_where_most_nodes_have_them(
    unhealthy: tuple[str, ...], is_believed: bool
) -> None:
    job = running(gpusPerNode=8)
    pods = make_pod(0, job), make_pod(1, job)
    seen = {
        name: NodeView(name, unhealthy=BAD_GPU if name in unhealthy else "", has_gpus=True)
        for name in NAMES
    }
    cpus = {f"cpu-{n}": NodeView(f"cpu-{n}") for n in range(20)}
    picture = observe(*pods, job=job, nodes=seen | cpus, progress=progress())
    result = plan(job, picture, NOW)
    assert deleted(result) == (["job-1"] if is_believed else [])
    reason = "UnhealthyGPU" if is_believed else "UnhealthyGPUs"
    assert says(result.status, "Healthy") == ("False", reason)
    missing = observe(pods[0], job=job, nodes=seen | cpus, progress=progress())
    (pod,) = [m for m in plan(job, missing, NOW).create if m["kind"] == "Pod"]
    avoided = pod["spec"].get("affinity", {}).get("nodeAffinity")
    assert (avoided is not None) == is_believed, "or there would be nowhere to go"
