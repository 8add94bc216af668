"""Which jobs start after which, of those in the cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from fluxtrain.contract.resource.status import read_status
from fluxtrain_operator import names
from fluxtrain_operator.controller.cache import Cache
from fluxtrain_operator.job import Job
from fluxtrain_operator.mappings import items, mapping
from fluxtrain_operator.names import Key
from fluxtrain_operator.planner.predecessors import FAILED
from fluxtrain_operator.planner.status import finished

_MAX_JOBS = 100
"""Of a cycle: each waiting job is planned again when one before it changes."""


def phases_of_predecessors(cache: Cache, job: Job) -> dict[str, str]:
    """Return the phases, by name, of those existing jobs that ``job`` starts after."""
    predecessors = job.spec.lifecycle.start_after
    jobs = {name: cache.job((job.namespace, name)) for name in predecessors}
    return {
        name: str((manifest.get("status") or {}).get("phase", ""))
        for name, manifest in jobs.items()
        if manifest is not None
    }


def is_awaited(cache: Cache, key: Key) -> bool:
    """Return whether a job that an ended job lets start may not have seen yet that it has ended."""
    has_failed = mapping(cache.job(key) or {}, "status").get("phase") == FAILED
    jobs = map(cache.job, cache.jobs_after(key))
    return any(
        _waits_for(job, key[1]) and (not has_failed or _starts_after_failures(job))
        for job in jobs
        if job is not None
    )


def cycle_of(cache: Cache, key: Key) -> tuple[str, ...]:
    """Return the shortest chain of jobs that wait for one another, from a job to itself.

    It is empty if there is none, or none among the first `_MAX_JOBS`.
    """
    namespace, start = key
    before: dict[str, str] = {}
    queue = deque([start])
    while queue and len(before) < _MAX_JOBS:
        name = queue.popleft()
        for predecessor in _awaited(cache.job((namespace, name))):
            if predecessor == start:
                return (*_chain(name, before), start)
            if predecessor not in before:
                before[predecessor] = name
                queue.append(predecessor)
    return ()


def _chain(name: str, before: Mapping[str, str]) -> list[str]:
    """Return the jobs from the first one to ``name``."""
    chain = [name]
    while chain[-1] in before:
        chain.append(before[chain[-1]])
    return chain[::-1]


def _awaited(manifest: Mapping[str, Any] | None) -> list[str]:
    """Return the jobs that a job waits for; its status is not validated, as many are looked at."""
    if manifest is None or is_ignored(manifest):
        return []
    status = mapping(manifest, "status")
    if status.get("attempt") or status.get("phase") in ("Complete", "Failed"):
        return []
    predecessors = items(mapping(mapping(manifest, "spec"), "lifecycle"), "startAfter")
    seen = items(status, "completedPredecessors")
    return [str(name) for name in predecessors if name not in seen]


def _waits_for(manifest: Mapping[str, Any], predecessor: str) -> bool:
    """Return whether a job that starts after ``predecessor`` has not begun, nor seen that it is complete."""
    status = read_status(manifest.get("status"))
    has_seen = status.attempt > 0 or predecessor in status.completed_predecessors
    return not (has_seen or finished(status) or is_ignored(manifest))


def _starts_after_failures(manifest: Mapping[str, Any]) -> bool:
    lifecycle = mapping(mapping(manifest, "spec"), "lifecycle")
    return lifecycle.get("startWhen") == "Ended"


def is_ignored(manifest: Mapping[str, Any]) -> bool:
    """Return whether a job is being deleted or has another manager: then not even errors are reported."""
    managed_by = manifest.get("spec", {}).get("managedBy", names.MANAGED_BY)
    return "deletionTimestamp" in manifest["metadata"] or managed_by != names.MANAGED_BY
