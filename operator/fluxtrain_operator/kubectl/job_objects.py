"""The objects of one job: the FluxTraining, its pods, the events of both, and Kueue's workload."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fluxtrain.contract.resource.fluxtraining import KIND
from fluxtrain_operator import names
from fluxtrain_operator.job import Manifest
from fluxtrain_operator.kubectl.client import Kubectl
from fluxtrain_operator.kubectl.errors import KubectlError
from fluxtrain_operator.timestamps import seconds

_WORKLOADS = "workloads.kueue.x-k8s.io"


@dataclass(frozen=True)
class JobObjects:
    """A job and what belongs to it."""

    job: Manifest
    pods: tuple[Manifest, ...] = ()
    """Pods that the job controls, by name."""
    events: tuple[Manifest, ...] = ()
    """Events about the job and its pods, also those that are gone, oldest first."""
    workload: Manifest | None = None
    """Kueue's workload of the present pods, read if they wait for Kueue."""
    unread: tuple[str, ...] = ()
    """What could not be read, and why."""


def read_job(kubectl: Kubectl, name: str) -> JobObjects:
    """Return the objects of the job ``name``.

    Raises KubectlError if the job cannot be read. What else cannot be read is in ``unread``: a status alone
    says much.
    """
    job = kubectl.job(name)
    unread: list[str] = []
    pods = _list(unread, "pods", lambda: kubectl.pods(job, names.selector(name)))
    events = _list(unread, "events", lambda: kubectl.items("events"))
    return JobObjects(
        job=job,
        pods=tuple(sorted(pods, key=_index)),
        events=events_of(job, events),
        workload=_workload(kubectl, job, pods),
        unread=tuple(unread),
    )


def events_of(job: Manifest, events: list[Manifest]) -> tuple[Manifest, ...]:
    """Return the ``events`` about ``job``, and about pods with the names of its pods, oldest first.

    Events before the job's creation are those of an earlier job with the same name.
    """
    created = seconds(job["metadata"].get("creationTimestamp")) or 0.0
    matching = (event for event in events if _is_about(event.get("involvedObject") or {}, job))
    recent = (event for event in matching if event_time(event) >= created)
    return tuple(sorted(recent, key=event_time))


def event_time(event: Mapping[str, Any]) -> float:
    """Return the Unix time of the last occurrence of ``event``."""
    series = event.get("series") or {}
    times = (
        series.get("lastObservedTime"),
        event.get("lastTimestamp"),
        event.get("eventTime"),
        event.get("firstTimestamp"),
        (event.get("metadata") or {}).get("creationTimestamp"),
    )
    return next((time for text in times if (time := seconds(text)) is not None), 0.0)


def _is_about(regarding: Mapping[str, Any], job: Manifest) -> bool:
    name, uid = job["metadata"]["name"], job["metadata"].get("uid")
    if regarding.get("kind") == KIND:
        return regarding.get("name") == name and regarding.get("uid") in (uid, None, "")
    if regarding.get("kind") != "Pod":
        return False
    pod = str(regarding.get("name"))
    number = re.search(r"-(\d{1,9})$", pod)
    return pod == names.pod(name, int(number[1])) if number else names.is_rendezvous(name, pod)


def _index(pod: Manifest) -> tuple[bool, int, str]:
    """Return the sort key of a pod: training pods by number, then the rendezvous pod."""
    text = (pod["metadata"].get("labels") or {}).get(names.LABEL_INDEX, "")
    number = int(text) if text.isdecimal() else -1
    return number < 0, number, pod["metadata"]["name"]


def _list(unread: list[str], what: str, read: Callable[[], list[Manifest]]) -> list[Manifest]:
    try:
        return read()
    except KubectlError as error:
        unread.append(f"{what} ({error})")
        return []


def group_of(job: Manifest) -> str:
    """Return the name of Kueue's pod group, and workload, of the present pods."""
    status = job.get("status") or {}
    number = status.get("groupAttempt") or status.get("attempt", 1)
    return names.kueue_group(job["metadata"]["name"], number)


def _workload(kubectl: Kubectl, job: Manifest, pods: list[Manifest]) -> Manifest | None:
    gates = (gate for pod in pods for gate in pod["spec"].get("schedulingGates") or ())
    if not any(gate.get("name") == names.KUEUE_GATE for gate in gates):
        return None
    try:
        return kubectl.get(_WORKLOADS, group_of(job))
    except KubectlError:
        return None  # its absence is no news: the gate says what is waited for
