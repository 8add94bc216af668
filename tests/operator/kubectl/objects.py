"""Objects of a job as kubectl prints them; the status is the planner's."""

from __future__ import annotations

from typing import Any

from tests.operator.planner import pods as pods_of_planner
from tests.operator.planner.pods import LONG_AGO, NOW

from fluxtrain.contract.resource.status import Status
from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Manifest
from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.kubectl.client import JobObjects
from fluxtrain_operator.planner.observed import Observed
from fluxtrain_operator.planner.plan import plan
from fluxtrain_operator.resources import Slot, rendezvous_pod, training_pod

UID = "uid"


def make_training(status: Status | Manifest | None = None, **spec: Any) -> Manifest:
    """Return the FluxTraining ``team/job``, created two hours ago."""
    if isinstance(status, Status):
        status = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    metadata = {"name": "job", "namespace": "team", "uid": UID, "generation": 1}
    return {
        "metadata": {**metadata, "creationTimestamp": stamp(LONG_AGO)},
        "spec": {"nodes": {"min": 2, "max": 2}, **spec},
        "status": status or {},
    }


def make_pod(
    index: int = 0, component: str = names.TRAINER, spec: Manifest | None = None, **status: Any
) -> Manifest:
    """Return a pod of the job's first attempt; without ``status`` it has just been created."""
    job = pods_of_planner.make_job(**{"nodes": {"min": 2, "max": 2}, **(spec or {})})
    is_trainer = component == names.TRAINER
    pod = training_pod(job, Slot(index)) if is_trainer else rendezvous_pod(job)
    name = pod["metadata"]["name"]
    owner = {"kind": "FluxTraining", "name": "job", "uid": UID, "controller": True}
    pod["metadata"] |= {
        "uid": f"uid-{name}",
        "creationTimestamp": stamp(LONG_AGO),
        "ownerReferences": [owner],
    }
    pod["spec"]["nodeName"] = f"node-{index}"
    return {**pod, "status": {"phase": "Pending", **status}}


def running(index: int = 0, component: str = names.TRAINER, started: float = LONG_AGO) -> Manifest:
    """Return a pod that has run since the Unix time ``started``."""
    state = {"running": {"startedAt": stamp(started)}}
    container = {"name": component, "image": "trainer:1", "state": state}
    return make_pod(index, component, phase="Running", containerStatuses=[container])


def waiting(index: int, reason: str, message: str = "", component: str = names.TRAINER) -> Manifest:
    """Return a pod whose container waits."""
    state = {"waiting": {"reason": reason, **({"message": message} if message else {})}}
    container = {"name": component, "image": "trainer:1", "state": state}
    return make_pod(index, component, containerStatuses=[container])


def taken(reason: str = "", text: str = "", by: str = "", code: int | None = None) -> Manifest:
    """Return the pod 1 that ended with ``reason``, with DisruptionTarget of the reason ``by``.

    Without a ``reason`` and a ``code`` it is being deleted.
    """
    state: Manifest = {"running": {"startedAt": stamp(LONG_AGO)}}
    if code is not None:
        times = {"startedAt": stamp(LONG_AGO), "finishedAt": stamp(NOW - 1)}
        state = {"terminated": {"exitCode": code, "reason": "Error", **times}}
    told = {"type": "DisruptionTarget", "status": "True", "reason": by, "message": text}
    pod = make_pod(
        1,
        phase="Failed" if reason or code else "Running",
        containerStatuses=[{"name": names.TRAINER, "image": "trainer:1", "state": state}],
        conditions=[told] if by else [],
        **({"reason": reason, "message": text} if reason else {}),
    )
    if not (reason or code):
        pod["metadata"]["deletionTimestamp"] = stamp(NOW + 20)
    return pod


def unscheduled(index: int, reason: str, message: str, spec: Manifest | None = None) -> Manifest:
    """Return a pod without a node."""
    condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
    pod = make_pod(index, spec=spec, conditions=[condition])
    del pod["spec"]["nodeName"]
    return pod


def make_event(
    reason: str, message: str, pod: str = "", kind: str = "Normal", seconds_ago: float = 30.0
) -> Manifest:
    """Return an event about ``pod``, or about the job."""
    about = {"kind": "Pod", "name": pod} if pod else {"kind": "FluxTraining", "name": "job"}
    return {
        "involvedObject": about,
        "reason": reason,
        "message": message,
        "type": kind,
        "lastTimestamp": stamp(NOW - seconds_ago),
    }


def state_of(
    *pods: Manifest,
    before: Status | None = None,
    events: tuple[Manifest, ...] = (),
    workload: Manifest | None = None,
    spec: dict[str, Any] | None = None,
    **observed: Any,
) -> JobObjects:
    """Return a job with ``pods``, all supporting objects and the status that the planner gives it."""
    spec = {"nodes": {"min": 2, "max": 2}, **(spec or {})}
    job = pods_of_planner.make_job(before, **spec)
    applied = pods_of_planner.observe(job).applied
    seen = {"any_progress": observed.get("progress"), "applied": applied, **observed}
    status = plan(job, Observed.from_objects(pods, **seen), NOW).status
    return JobObjects(make_training(status, **spec), pods, events, workload)
