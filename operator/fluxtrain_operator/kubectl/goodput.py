"""``kubectl fluxtrain goodput [NAME]``: productive and lost time of one job, or of all."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from fluxtrain_operator.durations import duration
from fluxtrain_operator.job import Manifest
from fluxtrain_operator.kubectl.client import Kubectl
from fluxtrain_operator.kubectl.rows import aligned
from fluxtrain_operator.timestamps import seconds

_NONE = "-"
_SPENT, _PRODUCTIVE = "timeSpent", "step"
"""Status field with the seconds spent by cause, and the cause that is productive. All others are lost time;
they are not listed here, as a newer operator may know others. An older operator does not write the field."""


def goodput(kubectl: Kubectl, name: str | None, all_namespaces: bool) -> str:
    """Return the table of the job ``name``, or of all jobs. Raises KubectlError."""
    if name is not None:
        return table([kubectl.job(name)], time.time(), all_namespaces)
    scope = ["--all-namespaces"] if all_namespaces else []
    jobs = kubectl.statuses(*scope)
    return table(jobs, time.time(), all_namespaces) if jobs else "no jobs"


def table(jobs: list[Manifest], now: float, with_namespace: bool = False) -> str:
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
