"""The rendezvous pod is told the places of nodes, and is replaced for them only before a job starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.operator.planner.pods import (
    LONG_AGO,
    NOW,
    OPEN,
    created_pods,
    deleted,
    make_pods,
    plan_with,
    rendezvous,
    started,
)

from fluxtrain.contract.process import place_of, read_places, write_places
from fluxtrain_operator.base.job import Job
from fluxtrain_operator.base.reports import Heard
from fluxtrain_operator.planner.observed import NodeView
from fluxtrain_operator.planner.plan import Plan

RACK = "example.com/rack"
START = replace(OPEN, generation=0)
"""The service answers, and its agents have not met yet."""


def node(name: str, rack: str | None = "r1", **changes: Any) -> NodeView:
    labels = {} if rack is None else {RACK: rack, "other": "x"}
    return NodeView(name, labels=labels, created=LONG_AGO, **changes)


def cluster(**racks: str | None) -> dict[str, NodeView]:
    """Nodes by name, ``_`` for ``-``."""
    names = {name.replace("_", "-"): rack for name, rack in racks.items()}
    return {name: node(name, rack) for name, rack in names.items()}


def rack_job(field: str = "topology", **spec: Any) -> Job:
    return started(scheduling={field: RACK}, **spec)


def argument(result: Plan) -> str | None:
    """The places of the rendezvous pod that is created."""
    pods = {pod["metadata"]["name"]: pod for pod in created_pods(result)}
    (container,) = pods["job-rendezvous"]["spec"]["containers"]
    found = [a.removeprefix("--places=") for a in container["args"] if a.startswith("--places=")]
    return found[0] if found else None


@pytest.mark.parametrize("field", ["topology", "requiredTopology"])
def test_the_rendezvous_pod_is_told_the_places_of_all_nodes(field: str) -> None:
    nodes = cluster(node_0="r2", node_1="r1", spare="r2", plain=None)
    job = rack_job(field)
    result = plan_with(job, *make_pods(2, job), rendezvous=None, nodes=nodes)
    assert argument(result) == write_places({"node-0": "r2", "node-1": "r1", "spare": "r2"})


@pytest.mark.parametrize("nodes", [{}, cluster(node_0=None), cluster(node_0="")])
def test_without_places_the_argument_is_empty(nodes: dict[str, NodeView]) -> None:
    assert argument(plan_with(rack_job(), rendezvous=None, nodes=nodes)) == ""


def test_a_job_without_topology_is_told_nothing() -> None:
    nodes = cluster(node_0="r2")
    assert argument(plan_with(started(), rendezvous=None, nodes=nodes)) is None


def test_the_nodes_of_the_jobs_pods_come_first_and_the_list_is_bounded() -> None:
    others = {f"a{number:05d}": node(f"a{number:05d}") for number in range(20_000)}
    job = rack_job()
    nodes = {**others, **cluster(node_0="r2", node_1="r3")}
    result = plan_with(job, *make_pods(2, job), rendezvous=None, nodes=nodes)
    told = read_places(argument(result) or "")
    places = [place_of(name, told) for name in ("a00000", "node-0", "node-1", "a19999")]
    assert places == [0, 1, 2, None]
    assert 7_500 < len(told) < 8_000


def test_a_job_with_gpus_is_told_nodes_with_gpus_that_exist() -> None:
    nodes = {
        "cpu": node("cpu"),
        "gpu": node("gpu", has_gpus=True),
        "gone": node("gone", has_gpus=True, gone=True),
    }
    result = plan_with(rack_job(gpusPerNode=8), rendezvous=None, nodes=nodes)
    assert argument(result) == write_places({"gpu": "r1"})


def replaced(job: Job, nodes: dict[str, NodeView], heard: Heard = START, **changes: Any) -> bool:
    """Whether the rendezvous pod is replaced, whose pod was created at NOW - 60."""
    pods = changes.pop("pods", make_pods(2, job, created=NOW - 60))
    service = rendezvous(job, created=NOW - 60, started=NOW - 50)
    result = plan_with(job, *pods, rendezvous=service, nodes=nodes, heard=heard, **changes)
    assert deleted(result) in ([], ["job-rendezvous"])
    return bool(deleted(result))


OLD = cluster(node_0="r2", node_1="r1")
NEW = OLD | {"node-1": replace(OLD["node-1"], created=NOW - 30)}


def test_a_service_that_is_older_than_a_node_is_replaced_once_before_the_start() -> None:
    job = rack_job()
    assert replaced(job, NEW)
    service = rendezvous(job, created=NOW - 20, started=NOW - 10)
    result = plan_with(job, *make_pods(2, job), rendezvous=service, nodes=NEW, heard=START)
    assert deleted(result) == []


@pytest.mark.parametrize(
    "nodes",
    [OLD, cluster(node_0="r9", node_1="r9"), {}, {**OLD, "node-1": node("node-1", None)}],
    ids=["known nodes", "changed labels", "unknown nodes", "a label is gone"],
)
def test_it_is_kept_for_known_nodes_whatever_their_labels(nodes: dict[str, NodeView]) -> None:
    assert not replaced(rack_job(), nodes)


def test_it_is_kept_for_a_new_node_without_the_label() -> None:
    assert not replaced(rack_job(), {**NEW, "node-1": replace(NEW["node-1"], labels={})})


@pytest.mark.parametrize(
    "heard", [OPEN, Heard(), replace(OPEN, generation=1), replace(OPEN, generation=9)]
)
def test_it_is_kept_once_agents_have_met_and_without_an_answer(heard: Heard) -> None:
    assert not replaced(rack_job(), NEW, heard)


def test_it_is_kept_until_all_pods_have_nodes() -> None:
    job = rack_job()
    pods = make_pods(2, job)
    waiting = replace(pods[1], node="", phase="Pending", started=None, ready=False)
    assert not replaced(job, {**NEW, "node-0": NEW["node-1"]}, pods=[pods[0], waiting])
    assert not replaced(rack_job(nodes={"min": 1, "max": 3}), NEW)


def test_it_is_kept_without_topology_and_if_its_revision_knows_no_places() -> None:
    assert not replaced(started(), NEW)
    job = rack_job()
    stored = job.spec_revision
    specs = {
        component: {
            **spec,
            "containers": [
                {**c, "args": [a for a in c["args"] if a != "--places="]} if "args" in c else c
                for c in spec["containers"]
            ],
        }
        for component, spec in stored.pod_specs.items()
    }
    older = replace(stored, pod_specs=specs)
    assert not replaced(job, NEW, revision=older)
