"""What others have done to objects of a job: finalizers that keep pods, a key that is deleted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.operator.planner.pods import (
    NOW,
    PENDING,
    condition,
    created,
    created_pods,
    failed,
    make_pod,
    make_pods,
    message,
    plan_with,
    progress,
    rendezvous,
    running,
    with_status,
)

from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Job
from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.planner.observed import Observed, Pod

ENDED: dict[str, Any] = {"phase": "Succeeded", "exit_code": 0, "deleting": True}
KEPT = {**ENDED, "finalizers": ("example.org/audit", names.KUEUE_FINALIZER)}


def without_rendezvous(job: Job, *kept: Pod) -> dict[str, Any]:
    return {"rendezvous": None, "kept_rendezvous": kept, "progress": progress()}


def test_a_rendezvous_pod_that_is_kept_is_named_with_its_finalizers() -> None:
    job = running()
    kept = without_rendezvous(job, rendezvous(job, **KEPT))
    result = plan_with(job, *make_pods(), **kept)
    assert condition(result.status, "Healthy") == ("False", "KeptByFinalizers")
    text = "job-rendezvous: deleted, kept by example.org/audit: "
    assert message(result.status, "Healthy").startswith(text)
    assert [event.reason for event in result.events] == ["KeptByFinalizers"]
    again = plan_with(with_status(job, result.status), *make_pods(), **kept)
    assert again.events == (), "it is told once"


def test_another_rendezvous_pod_with_the_same_host_name_takes_the_place_of_one_that_is_kept() -> (
    None
):
    job = running()
    kept = [rendezvous(job, **KEPT), rendezvous(job, **KEPT, name="job-rendezvous2")]
    (first,) = created_pods(plan_with(job, *make_pods(), **without_rendezvous(job, kept[0])))
    (second,) = created_pods(plan_with(job, *make_pods(), **without_rendezvous(job, *kept)))
    (again,) = created_pods(plan_with(job, *make_pods(), **without_rendezvous(job, kept[1])))
    places = [(pod["metadata"]["name"], pod["spec"]["hostname"]) for pod in (first, second, again)]
    host = "job-rendezvous"  # by which agents find it
    assert places == [("job-rendezvous2", host), ("job-rendezvous3", host), (host, host)]


def test_a_rendezvous_pod_is_found_beside_those_that_are_kept() -> None:
    def manifest(name: str, **metadata: Any) -> dict[str, Any]:
        labels = names.labels("job", names.RENDEZVOUS)
        status = {"phase": "Failed" if "deletionTimestamp" in metadata else "Running"}
        spec = {"nodeName": "node-0"}
        metadata |= {"name": name, "uid": name, "labels": labels}
        return {"metadata": metadata, "spec": spec, "status": status}

    deleted = {"deletionTimestamp": stamp(NOW), "finalizers": ["example.org/audit"]}
    kept, found = manifest("job-rendezvous", **deleted), manifest("job-rendezvous2")
    observed = Observed.from_objects([kept, found])
    assert observed.rendezvous is not None
    assert observed.rendezvous.name == "job-rendezvous2"
    assert [pod.name for pod in observed.kept_rendezvous] == ["job-rendezvous"]
    assert Observed.from_objects([kept]).rendezvous is None
    forced = manifest("job-rendezvous", **deleted, deletionGracePeriodSeconds=0)
    forced["status"]["phase"] = "Running"
    assert Observed.from_objects([forced]).rendezvous is None, "its node is lost"
    unchanged = manifest("job-rendezvous", **{**deleted, "finalizers": []})
    assert Observed.from_objects([unchanged]).rendezvous is not None, "it is about to go"


def test_a_training_pod_with_another_index_takes_the_place_of_one_that_is_kept() -> None:
    job, finalizers = running(), ("example.org/audit",)
    kept = failed(1, 75, deleting=True, finalizers=finalizers)
    result = plan_with(job, make_pod(0), kept, progress=progress())
    assert created(result) == ["job-2"]
    unscheduled = make_pod(1, **PENDING, node="", deleting=True, finalizers=finalizers)
    assert created(plan_with(job, make_pod(0), unscheduled, progress=progress())) == ["job-2"]
    forced = make_pod(1, deleting=True, forced=True, finalizers=finalizers)
    assert created(plan_with(job, make_pod(0), forced, progress=progress())) == ["job-2"]
    leaving = make_pod(1, deleting=True, finalizers=finalizers)
    assert created(plan_with(job, make_pod(0), leaving, progress=progress())) == []
    one = running(1, nodes={"min": 1, "max": 1})
    of_one = failed(0, 75, one, deleting=True, finalizers=finalizers)
    assert created(plan_with(one, of_one, rendezvous=rendezvous(one))) == ["job-1"]


def test_a_job_is_suspended_although_one_of_its_pods_is_kept() -> None:
    job = running(lifecycle={"suspend": True})
    gone = failed(1, 75, deleting=True, finalizers=("example.org/audit",))
    assert condition(plan_with(job, gone).status, "Suspended") == ("True", "Suspended")
    by_kueue = replace(gone, finalizers=(names.KUEUE_FINALIZER,))
    assert condition(plan_with(job, by_kueue).status, "Suspended") == ("False", "Stopping")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"finalizers": ("example.org/audit",)}, "KeptByFinalizers"),
        ({"finalizers": (names.KUEUE_FINALIZER,)}, "Degraded"),
        ({}, "Degraded"),
    ],
)
def test_a_training_pod_that_is_kept(changes: dict[str, Any], reason: str) -> None:
    job = running()
    gone = failed(1, 75, deleting=True, deletion_deadline=NOW + 100, **changes)
    result = plan_with(job, make_pod(0), gone, progress=progress())
    assert condition(result.status, "Healthy") == ("False", reason)


def test_the_key_is_created_before_any_pod_as_somebody_may_have_deleted_it() -> None:
    result = plan_with(running(), make_pod(0), progress=progress())
    assert [m["kind"] for m in result.create if m["kind"] in ("Secret", "Pod")] == ["Secret", "Pod"]
    assert result.create[-1]["metadata"]["name"] == "job-1"
    assert "immutable" not in next(m for m in result.create if m["kind"] == "Secret")
