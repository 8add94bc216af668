"""Why a pod does not run, from its status and its events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fluxtrain_operator.durations import duration
from fluxtrain_operator.timestamps import seconds

_PATIENCE_SECONDS = 90.0
"""A pod that is deleted may take this long beyond its grace period; later, its node is in question."""
_CREATING = ("ContainerCreating", "PodInitializing")
_PULLING, _PULLED = "Pulling", "Pulled"
_UNENDED = ("Pending", "Running")


@dataclass(frozen=True)
class PodProblem:
    """Why one pod does not run."""

    pod: str
    reason: str
    """For machines, in CamelCase."""
    message: str
    """For people; begins with what the pod does."""


def problem_of(
    pod: Mapping[str, Any], events: Sequence[Mapping[str, Any]], now: float
) -> PodProblem | None:
    """Return why ``pod`` does not run; None if it does, or has ended. ``events`` are oldest first."""
    name, status = pod["metadata"]["name"], pod.get("status") or {}
    if _is_kept(pod):
        return None
    if deletion := _deletion(pod, now):
        return PodProblem(name, "Terminating", deletion)
    if status.get("phase") not in (None, *_UNENDED):
        return None
    scheduled = next((c for c in status.get("conditions") or () if _is_unscheduled(c)), None)
    if scheduled is not None:
        reason = scheduled.get("reason", "Unschedulable")
        text = (
            "waits at a scheduling gate" if reason == "SchedulingGated" else "cannot be scheduled"
        )
        return PodProblem(name, reason, _joined(text, scheduled.get("message")))
    about = [event for event in events if _regards(event, name, pod["metadata"].get("uid"))]
    waiting = next(_waiting(status), None)
    if waiting is None:
        return None if status.get("containerStatuses") else _unstarted(name, pod, about)
    return _container_problem(name, waiting, about, now)


def _deletion(pod: Mapping[str, Any], now: float) -> str:
    """Return since when a pod that is deleted should be gone; empty if it is in time."""
    deadline = seconds(pod["metadata"].get("deletionTimestamp"))
    if deadline is None or now < deadline + _PATIENCE_SECONDS:
        return ""
    node = (pod.get("spec") or {}).get("nodeName") or "no node"
    return f"should have been deleted {duration(now - deadline)} ago, but {node} has not done so"


def _is_kept(pod: Mapping[str, Any]) -> bool:
    """Return whether a deleted pod runs no longer, and finalizers keep its object: others take its place."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    runs = (pod.get("spec") or {}).get("nodeName") and status.get("phase") in (None, *_UNENDED)
    return "deletionTimestamp" in metadata and bool(metadata.get("finalizers")) and not runs


def _is_unscheduled(condition: Mapping[str, Any]) -> bool:
    return (condition.get("type"), condition.get("status")) == ("PodScheduled", "False")


def _waiting(status: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yield each container that waits, with its reason and message; init containers first."""
    for key in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(key) or ():
            state = (container.get("state") or {}).get("waiting")
            if state is not None:
                yield container, state


def _container_problem(
    pod: str,
    waiting: tuple[Mapping[str, Any], Mapping[str, Any]],
    events: list[Mapping[str, Any]],
    now: float,
) -> PodProblem:
    container, state = waiting
    reason, message = state.get("reason") or "Waiting", state.get("message")
    if reason in _CREATING:
        return _creation(pod, reason, events, now)
    text = (
        f"cannot start container {container.get('name')}, image {container.get('image')}: {reason}"
    )
    return PodProblem(pod, reason, _joined(text, message))


def _creation(pod: str, reason: str, events: list[Mapping[str, Any]], now: float) -> PodProblem:
    """Return what a kubelet that creates the containers is doing, from the newest event."""
    last = events[-1] if events else {}
    if last.get("type") == "Warning":
        return PodProblem(
            pod, str(last.get("reason")), _joined("cannot start", last.get("message"))
        )
    pulls = [event for event in events if event.get("reason") in (_PULLING, _PULLED)]
    if pulls and pulls[-1].get("reason") == _PULLING:
        since = seconds(pulls[-1].get("lastTimestamp") or pulls[-1].get("eventTime"))
        time = "" if since is None else f" for {duration(now - since)}"
        return PodProblem(pod, _PULLING, _joined(f"pulls an image{time}", pulls[-1].get("message")))
    return PodProblem(pod, reason, "is creating its containers")


def _unstarted(
    pod: str, manifest: Mapping[str, Any], events: list[Mapping[str, Any]]
) -> PodProblem | None:
    """Return the problem of a pod of which no kubelet has reported anything."""
    node = (manifest.get("spec") or {}).get("nodeName")
    last = events[-1] if events else {}
    if last.get("type") == "Warning":
        return PodProblem(
            pod, str(last.get("reason")), _joined("cannot start", last.get("message"))
        )
    if node:
        return PodProblem(
            pod,
            "NoReport",
            f"has been assigned to node {node}, which has reported nothing about it",
        )
    return PodProblem(pod, "NotScheduled", "has not been processed by a scheduler yet")


def _regards(event: Mapping[str, Any], pod: str, uid: object) -> bool:
    regarding = event.get("involvedObject") or {}
    same = (regarding.get("kind"), regarding.get("name")) == ("Pod", pod)
    return same and regarding.get("uid") in (uid, None, "")


def _joined(text: str, message: object) -> str:
    return f"{text}: {message}".rstrip(".") if message else text
