"""What others have done to objects of a job: finalizers that keep pods, a key that is deleted."""

from __future__ import annotations

from typing import Any

import pytest
from tests.operator.planner.pods import (
    NOW,
    condition,
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

from fluxtrain_operator import names

ENDED: dict[str, Any] = {"phase": "Succeeded", "exit_code": 0, "deleting": True}
KEPT = {**ENDED, "finalizers": ("example.org/audit", names.KUEUE_FINALIZER)}


def test_a_rendezvous_pod_that_is_kept_is_named_with_its_finalizers() -> None:
    job = running()
    result = plan_with(job, *make_pods(), rendezvous=rendezvous(job, **KEPT), progress=progress())
    assert condition(result.status, "Healthy") == ("False", "KeptByFinalizers")
    text = "job-rendezvous: deleted, kept by example.org/audit: "
    assert message(result.status, "Healthy").startswith(text)
    assert [event.reason for event in result.events] == ["KeptByFinalizers"]
    job = with_status(job, result.status)
    again = plan_with(job, *make_pods(), rendezvous=rendezvous(job, **KEPT), progress=progress())
    assert again.events == (), "it is told once"


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
