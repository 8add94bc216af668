"""Pods whose containers do not start: a fault of the node, of the image, or of an init container."""

from __future__ import annotations

from typing import Any

import pytest
from tests.operator.planner.pods import (
    NOW,
    causes,
    charged_and_free,
    condition,
    deleted,
    failed,
    make_pod,
    message,
    plan_with,
    progress,
    running,
    started,
    with_status,
)

from fluxtrain_operator.base import names
from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.planner.observed import Pod

GONE = "failed to create shim task: open /dev/dri/renderD129: no such file or directory"
NOT_STARTED: dict[str, Any] = {"reason": "StartError", "message": GONE, "started": None}


def init_failed(index: int = 0, code: int = 7, **changes: Any) -> Pod:
    """Return a pod whose init container exited with ``code``."""
    return failed(index, code, **{"init_container": "fetch", "reason": "Error", **changes})


@pytest.mark.parametrize("reason", ["StartError", "ContainerCannotRun"])
def test_a_container_that_starts_on_other_nodes_is_replaced_at_no_charge(reason: str) -> None:
    job = running(restart={"maxRestarts": 0})
    broken = failed(1, 128, **{**NOT_STARTED, "reason": reason})
    soon = plan_with(job, make_pod(0), broken, progress=progress())
    assert (soon.status.phase, deleted(soon)) == ("Running", [])
    result = plan_with(job, make_pod(0), broken, progress=progress(), now=NOW + 10)
    assert (result.status.phase, deleted(result)) == ("Running", ["job-1"])
    assert (charged_and_free(result.status), causes(result.status)) == ((0, 1), {"StartError": 1})
    assert [(f.node, f.reason) for f in result.status.node_faults] == [("node-1", "StartError")]
    assert GONE in next(e.message for e in result.events if e.reason == "StartError")


def test_a_container_that_starts_nowhere_fails_a_new_job() -> None:
    job = started()
    result = plan_with(job, failed(0, 128, **NOT_STARTED), failed(1, 128, **NOT_STARTED))
    assert condition(result.status, "Failed") == ("True", "StartError")
    assert (result.status.exit_code, result.status.node_faults) == (128, [])


def test_a_job_that_has_trained_is_restarted_if_its_only_container_does_not_start() -> None:
    nodes = {"min": 1, "max": 1}
    job, broken = running(1, nodes=nodes), failed(0, 128, **NOT_STARTED)
    result = plan_with(job, broken)
    assert (result.status.phase, result.status.attempt) == ("Restarting", 2)
    assert (charged_and_free(result.status), result.status.node_faults) == ((1, 0), [])
    last = running(1, nodes=nodes, restart={"maxRestarts": 0})
    assert condition(plan_with(last, broken).status, "Failed") == ("True", "RestartsExhausted")


@pytest.mark.parametrize("code", [1, 2, 7, 69, 75, 128])
def test_an_init_container_that_fails_is_charged_and_no_fault_of_its_node(code: int) -> None:
    job = running(restart={"maxRestarts": 1})
    first = plan_with(job, init_failed(1, code), make_pod(0), progress=progress())
    assert (first.status.phase, charged_and_free(first.status)) == ("Running", (1, 0))
    assert causes(first.status) == {"InitContainerFailed": 1}
    assert first.status.node_faults == []
    assert f"job-1: exit code {code}, init container fetch failed" in message(
        first.status, "Healthy"
    )
    again = init_failed(1, code, uid="new", replacement=1)
    second = plan_with(with_status(job, first.status), again, make_pod(0), progress=progress())
    assert condition(second.status, "Failed") == ("True", "RestartsExhausted")


def test_an_init_container_that_is_killed_costs_no_restart() -> None:
    result = plan_with(running(), init_failed(1, 137), make_pod(0), progress=progress())
    assert (charged_and_free(result.status), causes(result.status)) == ((0, 1), {"Killed": 1})
    assert result.status.node_faults == []


def ended(code: int, second: int, reason: str = "Error") -> dict[str, Any]:
    """Return the state of a container that ran for a second."""
    times = {"startedAt": stamp(NOW + second - 1), "finishedAt": stamp(NOW + second)}
    return {"terminated": {"exitCode": code, "reason": reason, "message": "curl: no\n", **times}}


def manifest(phase: str, main: dict[str, Any], *init: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    labels = {names.LABEL_COMPONENT: names.TRAINER}
    status = {
        "phase": phase,
        "initContainerStatuses": [{"name": name, "state": state} for name, state in init],
        "containerStatuses": [{"name": names.TRAINER, "state": main}],
    }
    return {"metadata": {"name": "job-0", "labels": labels}, "status": status}


WAITING = {"waiting": {"reason": "PodInitializing"}}


def test_the_init_container_that_failed_first_is_read() -> None:
    sidecar, fetch = ("proxy", ended(143, 9)), ("fetch", ended(7, 5))
    pod = Pod.from_object(manifest("Failed", WAITING, ("prepare", ended(0, 2)), sidecar, fetch))
    assert (pod.init_container, pod.exit_code, pod.message) == ("fetch", 7, "curl: no\n")
    assert (pod.started, pod.finished, pod.ended) == (NOW + 4, NOW + 5, True)


@pytest.mark.parametrize(
    ("phase", "main", "code"),
    [
        ("Pending", WAITING, None),
        ("Failed", ended(1, 20), 1),
        ("Failed", ended(128, 20, "StartError"), 128),
        ("Running", {"running": {"startedAt": stamp(NOW)}}, None),
    ],
)
def test_the_main_container_counts_once_it_was_started(
    phase: str, main: dict[str, Any], code: int | None
) -> None:
    pod = Pod.from_object(manifest(phase, main, ("proxy", ended(143, 9))))
    assert (pod.init_container, pod.exit_code) == ("", code)


@pytest.mark.parametrize("code", [132, 135, 139])
def test_a_pod_that_the_hardware_ends_is_replaced_and_charged(code: int) -> None:
    result = plan_with(running(), failed(1, code), make_pod(0), progress=progress())
    assert (result.status.phase, deleted(result)) == ("Running", ["job-1"])
    assert charged_and_free(result.status) == (1, 0)
