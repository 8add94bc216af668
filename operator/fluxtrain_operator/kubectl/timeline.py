"""``kubectl fluxtrain timeline NAME``: events, transitions and restarts of a job, in the order of time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from fluxtrain.contract.run.config import value_at
from fluxtrain_operator.base.job import Manifest
from fluxtrain_operator.base.names import duration, seconds, stamp
from fluxtrain_operator.kubectl.client import JobObjects, Kubectl, aligned, event_time, read_job

_MOMENTS = (
    ("Started", "startTime", "a pod passed all scheduling gates"),
    ("FirstStep", "progress.firstStepTime", "first step of the present processes"),
    ("Checkpoint", "checkpoint.time", "newest complete checkpoint"),
    ("LastStep", "progress.lastStepTime", "newest step"),
    ("Ended", "completionTime", "completed or failed"),
)
"""Times of the status: reason, path and text of each."""


_SUMMARIES = ("Ready", "Reconciling", "Stalled")
"""Conditions that repeat others."""
_INITIAL_REASONS = ("NotYet", "NotSuspended", "NotTraining", "AsExpected")
"""Reasons of conditions to which nothing has happened yet."""


class Entry(NamedTuple):
    """One line: the Unix time, what it is about, the reason in one word, and the message."""

    time: float
    about: str
    reason: str
    message: str


def timeline(kubectl: Kubectl, name: str) -> str:
    """Return the table of the job ``name``, oldest first. Raises KubectlError."""
    objects = read_job(kubectl, name)
    notes = [f"not read: {reason}" for reason in objects.unread]
    return "\n".join([table(entries(objects), time.time()), *notes])


def entries(objects: JobObjects) -> list[Entry]:
    """Return all entries, oldest first; those of one second in the order job, conditions, pods, events."""
    listed = [
        *_job(objects.job),
        *_conditions(objects.job),
        *(entry for pod in objects.pods for entry in _pod(pod)),
        *map(_event, objects.events),
    ]
    return sorted(listed, key=lambda entry: int(entry.time))


def table(listed: list[Entry], now: float) -> str:
    rows = [("TIME", "AGE", "ABOUT", "REASON", "MESSAGE")]
    for entry in listed:
        message = " ".join(entry.message.split())
        age = duration(now - entry.time)
        rows.append((stamp(entry.time), age, entry.about, entry.reason, message))
    return aligned(rows)


def _job(job: Manifest) -> Iterator[Entry]:
    created = seconds(job["metadata"].get("creationTimestamp"))
    if created is not None:
        yield Entry(created, "job", "Created", "")
    for reason, path, text in _MOMENTS:
        moment = seconds(value_at(job.get("status") or {}, path))
        if moment is not None:
            yield Entry(moment, "job", reason, _with_step(job, path, text))


def _with_step(job: Manifest, path: str, text: str) -> str:
    """Return ``text`` with the step that was reached at that time, if the status has it."""
    section = path.removesuffix("lastStepTime").removesuffix("time")
    if section == path or not section:
        return text
    step = value_at(job["status"], f"{section}step")
    return text if step is None else f"{text}: {step}"


def _conditions(job: Manifest) -> Iterator[Entry]:
    """Yield the last transition of each condition, but not summaries and initial values that say nothing.

    Its message may be newer: the operator writes it anew without a transition.
    """
    conditions = (job.get("status") or {}).get("conditions") or ()
    times = [seconds(condition.get("lastTransitionTime")) for condition in conditions]
    first = min((time for time in times if time is not None), default=None)
    for condition, moment in zip(conditions, times, strict=True):
        is_initial = moment == first and condition.get("reason") in _INITIAL_REASONS
        repeats = condition.get("type") in _SUMMARIES
        if moment is not None and not is_initial and not repeats:
            name = f"{condition.get('type')}={condition.get('status')}"
            now = condition.get("message") and f"now: {condition['message']}"
            yield Entry(moment, name, condition.get("reason", ""), now or "")


def _pod(pod: Manifest) -> Iterator[Entry]:
    """Yield creation, starts and ends of a pod that still exists."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    name = metadata["name"]
    created = seconds(metadata.get("creationTimestamp"))
    if created is not None:
        node = (pod.get("spec") or {}).get("nodeName")
        yield Entry(created, name, "PodCreated", f"now on node {node}" if node else "")
    for container in status.get("containerStatuses") or ():
        for key in ("lastState", "state"):
            yield from _states(name, container, container.get(key) or {})


def _states(pod: str, container: Mapping[str, Any], state: Mapping[str, Any]) -> Iterator[Entry]:
    about, name = pod, f"container {container.get('name')}"
    ended = state.get("terminated") or {}
    started = seconds((state.get("running") or ended).get("startedAt"))
    finished = seconds(ended.get("finishedAt"))
    if started is not None:
        yield Entry(started, about, "Running", name)
    if finished is not None:
        text = f"{name}, exit code {ended.get('exitCode')}"
        yield Entry(finished, about, str(ended.get("reason") or "Exited"), text)


def _event(event: Mapping[str, Any]) -> Entry:
    regarding = event.get("involvedObject") or {}
    about = "job" if regarding.get("kind") != "Pod" else str(regarding.get("name"))
    count = (event.get("series") or {}).get("count") or event.get("count") or 1
    times = f" ({count} times)" if count > 1 else ""
    message = f"{event.get('message') or ''}{times}"
    return Entry(event_time(event), about, str(event.get("reason") or ""), message)


_NONE = "-"
_SPENT, _PRODUCTIVE = "timeSpent", "step"
"""Status field with the seconds spent by cause, and the cause that is productive. All others are lost time;
they are not listed here, as a newer operator may know others."""


def goodput(kubectl: Kubectl, name: str | None, all_namespaces: bool) -> str:
    """Return the table of the job ``name``, or of all jobs. Raises KubectlError."""
    if name is not None:
        return goodput_table([kubectl.job(name)], time.time(), all_namespaces)
    scope = ["--all-namespaces"] if all_namespaces else []
    jobs = kubectl.statuses(*scope)
    return goodput_table(jobs, time.time(), all_namespaces) if jobs else "no jobs"


def goodput_table(jobs: list[Manifest], now: float, with_namespace: bool = False) -> str:
    """Return one row for each of ``jobs``; a column for each cause that any of them lost time to."""
    spent = [spent_seconds(job.get("status") or {}) for job in jobs]
    causes = dict.fromkeys(cause for times in spent for cause in times if times[cause])
    lost = [cause for cause in causes if cause != _PRODUCTIVE]
    first = ["NAMESPACE"] if with_namespace else []
    header = [*first, "NAME", "PHASE", "GOODPUT", "TIME", "PRODUCTIVE", "LOST"]
    rows = [[*header, *(cause.upper() for cause in lost)]]
    for job, times in zip(jobs, spent, strict=True):
        metadata = job["metadata"]
        names = [metadata.get("namespace", ""), metadata["name"]][0 if with_namespace else 1 :]
        by_cause = (_duration(times.get(cause)) for cause in lost)
        rows.append([*names, *_totals(job.get("status") or {}, times, now), *by_cause])
    return aligned(rows)


def spent_seconds(status: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds spent by cause; empty if ``status`` does not have them."""
    values = status.get(_SPENT)
    items = values.items() if isinstance(values, Mapping) else ()
    return {cause: float(value) for cause, value in items if _is_number(value)}


def _totals(status: Mapping[str, Any], spent: Mapping[str, float], now: float) -> list[str]:
    """Return phase, goodput, time without suspensions, productive and lost time."""
    goodput = status.get("goodput")
    elapsed = sum(spent.values()) if spent else _elapsed(status, now)
    productive = spent.get(_PRODUCTIVE) if spent else _productive(status)
    lost = None if elapsed is None or productive is None else elapsed - productive
    return [
        str(status.get("phase") or _NONE),
        f"{goodput:.1%}" if _is_number(goodput) else _NONE,
        *map(_duration, (elapsed, productive, lost)),
    ]


def _elapsed(status: Mapping[str, Any], now: float) -> float | None:
    """Return the seconds from the start to the end, or to now, without suspensions."""
    start = seconds(status.get("startTime"))
    if start is None:
        return None
    suspension = (c for c in status.get("conditions") or () if c.get("type") == "Suspended")
    since = next((c.get("lastTransitionTime") for c in suspension if c["status"] == "True"), None)
    end = seconds(status.get("completionTime")) or seconds(since) or now
    return max(0.0, end - start - float(status.get("suspendedSeconds") or 0))


def _productive(status: Mapping[str, Any]) -> float | None:
    """Return the seconds spent on steps since the job's start."""
    total = (status.get("progress") or {}).get("trainSeconds")
    if total is None:
        return None
    return max(0.0, float(total) - float(status.get("trainSecondsBefore") or 0.0))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _duration(value: float | None) -> str:
    return _NONE if value is None else duration(value)
