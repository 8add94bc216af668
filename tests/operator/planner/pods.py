"""Jobs, pods and observed states for the planner's tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.operator.jobs import make_training

from fluxtrain.contract.resource.status import ProgressStatus, Status
from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Job, Manifest
from fluxtrain_operator.base.names import ANNOTATION_APPLIED, stamp
from fluxtrain_operator.base.reports import MembersReport, Progress
from fluxtrain_operator.planner.observed import NodeView, Observed, Pod
from fluxtrain_operator.planner.plan import Plan, load, plan
from fluxtrain_operator.resources import DISRUPTION_BUDGET, supporting
from fluxtrain_operator.resources.scheduling import gang_of

NOW = 1_800_000_000.0
LONG_AGO = NOW - 7200
OPEN = MembersReport(attempt=0)
"""The answer of a rendezvous service that no agent of this attempt has reached yet."""
PENDING: dict[str, Any] = {"phase": "Pending", "started": None, "ready": False}
SUCCEEDED: dict[str, Any] = {"phase": "Succeeded", "exit_code": 0, "finished": NOW, "ready": False}


def make_job(status: Status | None = None, **spec: Any) -> Job:
    manifest = make_training(
        {"nodes": {"min": 1, "max": 2}, **spec}, namespace="team", uid="uid", generation=1
    )
    return with_status(load(manifest, "trainer:1"), status)


def with_status(job: Job, status: Status | None) -> Job:
    return replace(job, training=job.training.model_copy(update={"status": status}))


def started(**spec: Any) -> Job:
    """Return a job whose pods were requested two hours ago."""
    job = make_job(**spec)
    return with_status(job, plan(job, Observed(), LONG_AGO).status)


def running(num_pods: int = 2, **spec: Any) -> Job:
    """Return a job that trains, with the status that the planner gives it."""
    job = started(**spec)
    return with_status(job, plan_with(job, *make_pods(num_pods, job), progress=progress()).status)


def make_pod(index: int = 0, job: Job | None = None, **changes: Any) -> Pod:
    job = job or make_job()
    pod = Pod(
        name=f"job-{index}",
        uid=f"pod-{index}",
        index=index,
        spec_hash=job.spec_hash,
        nodes=(job.spec.nodes.min, job.spec.nodes.max),
        revision=job.spec_revision.name,
        phase="Running",
        ready=True,
        node=f"node-{index}",
        created=LONG_AGO,
        started=LONG_AGO,
    )
    return replace(pod, **changes)


def make_pods(count: int = 2, job: Job | None = None, **changes: Any) -> list[Pod]:
    return [make_pod(index, job, **changes) for index in range(count)]


def failed(index: int = 0, code: int | None = 1, job: Job | None = None, **changes: Any) -> Pod:
    end = {"phase": "Failed", "exit_code": code, "finished": NOW - 1, "ready": False}
    return make_pod(index, job, **{**end, **changes})


def rendezvous(job: Job | None = None, **changes: Any) -> Pod:
    return make_pod(
        0,
        job,
        **{
            "name": "job-rendezvous",
            "uid": "rdzv",
            "node": "node-s",
            "rendezvous_version": names.RENDEZVOUS_VERSION,
            **changes,
        },
    )


def progress(seconds_ago: float = 1.0, **changes: Any) -> Progress:
    last = stamp(NOW - seconds_ago)
    status = ProgressStatus(step=7, samples=56, samplesPerSecond=8.0, lastStepTime=last)
    return Progress(status, **changes)


def lost(*names: str) -> dict[str, NodeView]:
    """Return seven nodes of which ``names`` have not been ready for a minute."""
    spares = (f"spare-{number}" for number in range(4))
    nodes = {name: NodeView(name) for name in ("node-0", "node-1", "node-s", *spares)}
    return nodes | {name: NodeView(name, ready=False, since=NOW - 60) for name in names}


def observe(job: Job, *pods: Pod, **changes: Any) -> Observed:
    """Return an observed state in which all supporting objects of ``job`` exist."""
    applied = {
        (m["kind"], m["metadata"]["name"]): m["metadata"]["annotations"][ANNOTATION_APPLIED]
        for m in supporting(job, gang_of(job), job.spec_revision)
    }
    observed = {"pods": pods, "rendezvous": rendezvous(job), "applied": applied, "heard": OPEN}
    observed |= changes
    return Observed(**{"any_progress": changes.get("progress"), **observed})


def plan_with(job: Job, *pods: Pod, now: float = NOW, **changes: Any) -> Plan:
    return plan(job, observe(job, *pods, **changes), now)


def created_pods(result: Plan) -> list[Manifest]:
    return [manifest for manifest in result.create if manifest["kind"] == "Pod"]


def created(result: Plan) -> list[str]:
    return [pod["metadata"]["name"] for pod in created_pods(result)]


def deleted(result: Plan) -> list[str]:
    """Return the names of the deleted objects, that of a disruption budget left out."""
    return [delete.name for delete in result.delete if delete.kind != DISRUPTION_BUDGET]


def num_gang_restarts(status: Status) -> int:
    assert status.restarts is not None
    return status.restarts.gang


def charged_and_free(status: Status) -> tuple[int | None, int]:
    assert status.restarts is not None
    return status.restarts.charged, status.restarts.free


def causes(status: Status) -> dict[str, int]:
    assert status.restarts is not None
    return status.restarts.causes


def condition(status: Status, kind: str) -> tuple[str, str]:
    return next((c.status, c.reason) for c in status.conditions if c.type == kind)


def message(status: Status, kind: str) -> str:
    return next(c.message for c in status.conditions if c.type == kind)
