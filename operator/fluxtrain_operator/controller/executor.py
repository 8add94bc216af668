"""Carries out a plan: writes the status, deletes, creates, posts events; keeps a job's state in memory."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from itertools import pairwise
from typing import Any

from fluxtrain.contract.resource.fluxtraining import KIND
from fluxtrain.contract.resource.status import Condition, Status, preserve_unknown_fields
from fluxtrain_operator.base import names
from fluxtrain_operator.base.errors import ApiError
from fluxtrain_operator.base.job import Job, Manifest, Revision
from fluxtrain_operator.base.names import Key, mapping
from fluxtrain_operator.controller.api_client import KINDS, KubernetesApi
from fluxtrain_operator.controller.cache import Cache, Kind, Name
from fluxtrain_operator.planner.guard import DISRUPTION_PERCENT, NODE_FAULTS, Delete
from fluxtrain_operator.planner.observed import (
    NAME_CONFLICT,
    NO_POD_GROUPS,
    CreateFailure,
    is_controlled_by,
    is_rejection,
    name_conflict,
    no_pod_group,
    rejected,
    restored,
    unwatched,
)
from fluxtrain_operator.planner.plan import Event, Plan
from fluxtrain_operator.resources.existing import is_ownerless, is_restored, is_restored_pod
from fluxtrain_operator.resources.volumes import with_new_key

LOG = logging.getLogger(__name__)
NEVER = float("-inf")
STATUS_SECONDS = 3.0
"""Minimum interval of two status writes that differ only in the number of ready nodes."""
_POD_BATCH = 16
"""Pods of a job that are created concurrently; other jobs' requests are sent between batches."""
_POD_SLOTS = 16
"""Pods of all jobs of a namespace that are created concurrently: requests of others wait behind so many."""


@dataclass
class JobState:
    """In-memory state of a job; times are monotonic."""

    uid: str
    written: float = NEVER
    """Time of the last status write."""
    create_failures: dict[Name, CreateFailure] = field(default_factory=dict)
    """Why objects could not be created at the last try."""
    revision: Revision | None = None
    """The revision that was read last."""
    restored: list[tuple[Manifest, Manifest]] = field(default_factory=list)
    """Objects that could not be created, and the existing ones without an owner that have their content."""
    compared: dict[tuple[str, str], bool] = field(default_factory=dict)
    """Whether a pod without an owner runs what a revision has, by uid and revision."""
    conflicts: frozenset[Name] = frozenset()
    """Others' objects that were in the way when pods with names of the job's were looked for last."""
    has_searched: bool = False
    """Whether pods that no watch finds were searched for since the job is to stop."""

    def note_pod_group(self, manifest: Manifest, problem: str, now: float) -> None:
        """Record why an object of gang scheduling cannot be created, or that it can: no ``problem``."""
        name = _name(manifest)
        known = self.create_failures.get(name)
        is_noted = known is not None and known.reason == NO_POD_GROUPS
        if not problem:
            if is_noted:
                del self.create_failures[name]
        elif not (known and is_noted and now < known.retry_time):
            failure = no_pod_group(manifest, problem)
            self.create_failures[name] = failure.with_backoff(known, now)


@dataclass(frozen=True)
class Executor:
    """Writes statuses and objects, and stores the responses in the cache."""

    cache: Cache
    api: KubernetesApi
    _pod_slots: dict[str, asyncio.Semaphore] = field(default_factory=dict)
    """By namespace."""

    async def execute(
        self, manifest: Mapping[str, Any], job: Job, plan: Plan, state: JobState
    ) -> None:
        """Write the status, delete, create, post events: in this order, so that counts are never lost.

        With anything to delete or create, an unchanged status is written too: if the job has changed
        meanwhile, the API server refuses it and the outdated plan is dropped.
        """
        if plan.status != job.status or plan.delete or plan.create:
            await self.write_status(manifest, plan.status)
            state.written = time.monotonic()
        log_decision(manifest, job.status, plan)
        key = job.namespace, job.name
        await _gather(self.delete(key, job.uid, d, KINDS[d.kind]) for d in plan.delete)
        pods = [desired for desired in plan.create if desired["kind"] == "Pod"]
        support = [desired for desired in plan.create if desired["kind"] != "Pod"]
        state.restored.clear()
        await _gather(self._ensure(job, desired, state) for desired in support)
        await self._adopt(job, state)
        if not any(_name(desired) in state.create_failures for desired in support):
            await self._create_pods(job, pods, state)  # which mount the config map
        for event in plan.events:
            await self._post(job, event)

    async def _post(self, job: Job, event: Event) -> None:
        """Create an event; one that is refused, as by a quota, is logged: conditions say the same."""
        try:
            await self.api.create_event(job, event, time.time())
        except ApiError as error:
            LOG.warning("%s/%s: no event %s: %s", job.namespace, job.name, event.reason, error)

    async def write_status(self, manifest: Mapping[str, Any], after: Status) -> None:
        """Write the status ``after`` of the job in ``manifest``, keeping fields of newer operators.

        A job that is gone is a conflict with who deleted it: no error to report.
        """
        known_fields = after.model_dump(mode="json", by_alias=True, exclude_none=True)
        status = preserve_unknown_fields(manifest.get("status"), known_fields)
        try:
            self.cache.set_job(await self.api.write_status(manifest, status))
        except ApiError as error:
            if error.status == HTTPStatus.NOT_FOUND:  # deleted between two watches
                self.cache.set_job(manifest, deleted=True)
                raise ApiError(HTTPStatus.CONFLICT, "the job was deleted") from error
            raise

    async def unwatched_pods(self, job: Job) -> tuple[CreateFailure, ...]:
        """Return the job's own pods that run and have lost the label of the watch, as create failures."""
        listed = await self.api.list_unwatched_pods(job.namespace)
        own = (pod for pod in listed if is_controlled_by(pod, job.uid))
        runs = (p for p in own if mapping(p, "status").get("phase") not in ("Succeeded", "Failed"))
        failures = map(unwatched, runs)
        return tuple(failure for failure in failures if failure is not None)

    async def foreign_pods(
        self, job: Job, revision: Revision, state: JobState
    ) -> list[CreateFailure]:
        """Return the failures that pods with the job's label cause which it does not control.

        Those without an owner are compared with ``revision``. Whenever others' objects are in the way,
        ``state`` gets the pods without the label that have names of the job's, too: one message has all.
        """
        foreign = self.cache.foreign_pods((job.namespace, job.name))
        known = [*state.create_failures.values(), *(_conflict(pod, job) for pod in foreign)]
        conflicts = {(f.kind, f.name) for f in known if f.reason == NAME_CONFLICT}
        ownerless = {(_uid(pod), revision.name) for pod in foreign if is_ownerless(pod)}
        unknown = ownerless - state.compared.keys()
        if unknown or conflicts - state.conflicts:
            state.compared |= dict.fromkeys(unknown, False)
            state.conflicts = frozenset(conflicts)
            for pod in await self.api.list_pods(job.namespace):
                if (_uid(pod), revision.name) in unknown:
                    verdict = is_restored_pod(pod, job, revision)
                    state.compared[_uid(pod), revision.name] = verdict
                elif _has_name_of(job, pod) and not is_controlled_by(pod, job.uid):
                    failure = _conflict(pod, job).with_backoff(None, time.time())
                    state.create_failures.setdefault(("Pod", failure.name), failure)
        return [
            restored(pod)
            if state.compared.get((_uid(pod), revision.name)) and is_ownerless(pod)
            else _conflict(pod, job)
            for pod in foreign
        ]

    async def delete(self, key: Key, uid: str, deletion: Delete, version: str) -> None:
        """Delete an object of the job with ``uid``, if it still has the uid under which it is known."""
        if deletion.kind not in ("Pod", KIND):
            known = self.cache.applied.get(uid, (version, deletion.kind), deletion.name)
            if known is None:
                return  # gone meanwhile
            deletion = replace(deletion, uid=known.uid)
        remaining = await self.api.delete(key[0], deletion, version)
        if deletion.kind == "Pod" and remaining is None:
            self.cache.remove_pod(key, deletion.uid)
        elif remaining is not None and remaining.get("kind") == "Pod":
            self.cache.update_pod(key, remaining)

    async def _create_pods(self, job: Job, pods: list[Manifest], state: JobState) -> None:
        """Create ``pods`` in batches; after a rejection the others are not tried.

        A rendezvous pod is a batch of its own: without it, training pods would hold GPUs in vain.
        """
        first = sum(names.is_rendezvous(job.name, pod["metadata"]["name"]) for pod in pods[:1])
        ends = [*range(first, len(pods), _POD_BATCH), len(pods)]
        for start, end in pairwise([0, *ends]):
            batch = pods[start:end]
            await _gather(self._ensure_pod(job, pod, state) for pod in batch)
            known = (state.create_failures.get(_name(pod)) for pod in batch)
            failed = [failure for failure in known if failure is not None]
            rejection = next((f for f in failed if not f.is_name_conflict), None)
            if rejection is not None:
                rest = pods[end:]
                state.create_failures |= {_name(pod): rejection.for_object(pod) for pod in rest}
            if rejection is not None or (failed and end == first):
                return

    async def _ensure_pod(self, job: Job, pod: Manifest, state: JobState) -> None:
        slots = self._pod_slots.setdefault(job.namespace, asyncio.Semaphore(_POD_SLOTS))
        async with slots:
            await self._ensure(job, pod, state)

    async def _ensure(self, job: Job, desired: Manifest, state: JobState) -> None:
        """Create or change an object; record the failure if that is impossible."""
        name = _name(desired)
        before = state.create_failures.pop(name, None)
        try:
            failure = await self._create_or_apply(job, desired, state)
        except ApiError as error:
            if not is_rejection(error):
                raise
            failure = rejected(desired, error)
        if failure is not None:
            state.create_failures[name] = failure.with_backoff(before, time.time())

    async def _create_or_apply(
        self, job: Job, desired: Manifest, state: JobState
    ) -> CreateFailure | None:
        """Create or change an object; return the failure if another owner's object has its name.

        A known object is changed only if its uid is unchanged; any other is created. Another owner's
        object is therefore never overwritten, and a pod is never changed.
        """
        if desired["kind"] == "Secret":  # may not be read; its name has the job's uid
            await self.api.create(with_new_key(desired))
            return None
        applied = self.cache.applied.get(job.uid, _kind(desired), desired["metadata"]["name"])
        if applied is not None:
            self._record(job, await self.api.apply(desired, applied.uid), desired)
            return None
        existing = await self.api.create(desired)
        if existing is None:
            existing = await self.api.get(desired)
            if existing is not None and not is_controlled_by(existing, job.uid):
                if desired["kind"] != "Pod" and is_restored(existing, desired):
                    state.restored.append((desired, existing))
                return name_conflict(desired["kind"], existing, job.name)
            if existing is not None and desired["kind"] == "Pod" and (lost := unwatched(existing)):
                return lost
            if existing is not None and desired.get("immutable"):  # its content may be another
                existing = await self.api.apply(desired, existing["metadata"]["uid"])
        self._record(job, existing, desired)
        return None

    async def _adopt(self, job: Job, state: JobState) -> None:
        """Adopt the objects that a backup brought back, if the job's revision is one of them.

        The content of the revision is the proof; it comes last, so that the proof holds until all are done.
        """
        found = sorted(state.restored, key=lambda pair: pair[0]["kind"] == "ConfigMap")
        if not found or found[-1][0]["kind"] != "ConfigMap":
            return
        for desired, existing in found:
            name = _name(desired)
            try:
                adopted = await self._take_over(desired, existing["metadata"])
            except ApiError as error:
                if not is_rejection(error):
                    raise
                state.create_failures[name] = rejected(desired, error).with_backoff(
                    None, time.time()
                )
                return
            self._record(job, adopted, desired)
            state.create_failures.pop(name, None)
            LOG.info("%s/%s: adopts the restored %s %s", job.namespace, job.name, *name)

    async def _take_over(self, desired: Manifest, metadata: Manifest) -> Manifest | None:
        """Set the controller reference of an unchanged object, then the rest; None if it has changed."""
        identity = {key: metadata[key] for key in ("name", "namespace", "resourceVersion")}
        owners = {"ownerReferences": desired["metadata"]["ownerReferences"]}
        header = {key: desired[key] for key in ("apiVersion", "kind")}
        owned = await self.api.apply(
            {**header, "metadata": {**identity, **owners}}, metadata["uid"]
        )
        return None if owned is None else await self.api.apply(desired, metadata["uid"])

    def _record(self, job: Job, existing: Manifest | None, desired: Manifest) -> None:
        """Store the response to a request for ``desired``; raise ApiError if the object is gone."""
        name = _name(desired)
        if existing is None:
            self.cache.applied.discard(job.uid, _kind(desired), job.namespace, name[1])
            raise ApiError(HTTPStatus.CONFLICT, f"{' '.join(name)} was deleted or replaced")
        if desired["kind"] == "Pod":
            self.cache.set_pod(existing)
        else:
            self.cache.applied.set(_kind(desired), existing)


async def _gather(requests: Iterable[Awaitable[None]]) -> None:
    """Wait for all ``requests``, sent concurrently; then raise the first error."""
    results = await asyncio.gather(*requests, return_exceptions=True)
    for error in results:
        if error is not None:
            raise error


def _conflict(pod: Mapping[str, Any], job: Job) -> CreateFailure:
    return name_conflict("Pod", pod, job.name)


def _has_name_of(job: Job, pod: Mapping[str, Any]) -> bool:
    """Return whether a pod without the job's label has the name of one that ``job`` creates."""
    name = pod["metadata"]["name"]
    if mapping(pod["metadata"], "labels").get(names.LABEL_JOB) == job.name:
        return False
    index = names.index_of(job.name, name)
    is_needed = index is not None and index < job.spec.nodes.max
    return is_needed or name == names.rendezvous(job.name)


def _uid(manifest: Mapping[str, Any]) -> str:
    return str(manifest["metadata"].get("uid", ""))


def _name(manifest: Mapping[str, Any]) -> Name:
    return manifest["kind"], manifest["metadata"]["name"]


def _kind(manifest: Mapping[str, Any]) -> Kind:
    return manifest["apiVersion"], manifest["kind"]


def status_delay(before: Status, plan: Plan, state: JobState, now: float) -> float | None:
    """Return the seconds to delay the write of a status that only counts more pods; None: write it now.

    One write then reports several pods that start one after the other.
    """
    delay = state.written + STATUS_SECONDS - now
    has_actions = plan.delete or plan.create or plan.events
    if delay <= 0 or has_actions or plan.status == before:
        return None
    return delay if _differs_in_ready_nodes(before, plan.status) else None


def _differs_in_ready_nodes(before: Status, after: Status) -> bool:
    """Return whether two statuses differ only in the number of ready nodes and in conditions' messages."""
    unchanged = {"nodes": before.nodes, "conditions": before.conditions}
    conditions = [[(c.type, c.status) for c in status.conditions] for status in (before, after)]
    desired = [status.nodes and status.nodes.desired for status in (before, after)]
    return (
        conditions[0] == conditions[1]
        and desired[0] == desired[1]
        and after.model_copy(update=unchanged) == before
    )


_MAX_NAMES = 16
"""Names of objects in one record; more are counted."""


def log_decision(manifest: Mapping[str, Any], before: Status, plan: Plan) -> None:
    """Log the decision of ``plan`` for the job in ``manifest``, unless it changes progress only."""
    fields = decision_fields(manifest, before, plan)
    if fields is not None:
        text = "%(namespace)s/%(job)s: %(action)s, %(reason)s: %(detail)s"
        LOG.info(text % fields, extra={"fields": fields})


def decision_fields(
    manifest: Mapping[str, Any], before: Status, plan: Plan
) -> dict[str, Any] | None:
    """Return the keys of the record; None if ``plan`` changes progress only."""
    known = {(c.type, c.status, c.reason) for c in before.conditions}
    changed = [c for c in plan.status.conditions if (c.type, c.status, c.reason) not in known]
    acts = bool(plan.delete or plan.create or plan.events)
    if not (acts or changed or plan.status.phase != before.phase):
        return None
    reason, message = _reason(plan, changed)
    deleted = [f"{deletion.kind}/{deletion.name}" for deletion in plan.delete]
    created = [f"{desired['kind']}/{desired['metadata']['name']}" for desired in plan.create]
    metadata = manifest["metadata"]
    return {
        "namespace": metadata.get("namespace", ""),
        "job": metadata["name"],
        "uid": metadata.get("uid", ""),
        "attempt": plan.status.attempt,
        "phase": plan.status.phase,
        "action": _action(plan),
        "reason": reason,
        "detail": message,
        **({"delete": _bounded(deleted)} if deleted else {}),
        **({"create": _bounded(created)} if created else {}),
        **({"conditions": [f"{c.type}={c.status} {c.reason}" for c in changed]} if changed else {}),
    }


def _action(plan: Plan) -> str:
    if plan.decision is not None and plan.decision.in_place_restart is not None:
        return "restart in place"
    if plan.decision is not None and plan.decision.pod_replacement is not None:
        return "replace"
    if plan.decision is not None:
        return plan.decision.action
    return "clean up" if plan.delete else "report"


def _reason(plan: Plan, changed: list[Condition]) -> tuple[str, str]:
    """Return reason and message: the decision's, or an event's, or a condition's."""
    if plan.decision is not None and plan.decision.reason:
        return plan.decision.reason, plan.decision.message
    if plan.events:
        return plan.events[0].reason, plan.events[0].message
    if any(deletion.kind == KIND for deletion in plan.delete):
        return "Expired", "spec.lifecycle.ttlSecondsAfterFinished is over"
    if plan.decision is None and plan.delete:
        return "CleanPods", "spec.lifecycle.cleanPods of a finished job"
    if changed:
        return changed[0].reason, changed[0].message
    return "Desired", "objects differ from what the spec asks for"


def _bounded(names: Iterable[str]) -> list[str]:
    """Return the first ``names``, and how many more there are."""
    listed = list(names)
    rest = len(listed) - _MAX_NAMES
    return listed if rest <= 0 else [*listed[:_MAX_NAMES], f"and {rest} more"]


MIN_PODS = 8
"""Pods per minute that may always be replaced: those of a rack, or of a small cluster."""
_WINDOW_SECONDS = 60.0


@dataclass
class FaultBudget:
    """Counts the pods deleted for faults of nodes, in monotonic time; a new leader starts at zero."""

    percent: int = DISRUPTION_PERCENT
    """Of all pods, per minute."""
    _deleted: dict[str, float] = field(default_factory=dict)
    """Times by uid."""

    def left(self, num_pods: int, now: float) -> int:
        """Return how many more of ``num_pods`` may be deleted now."""
        recent = {uid: time for uid, time in self._deleted.items() if now < time + _WINDOW_SECONDS}
        self._deleted = recent
        return max(0, max(MIN_PODS, num_pods * self.percent // 100) - len(recent))

    def record(self, deletions: Iterable[Delete], now: float) -> None:
        """Count those of ``deletions`` that are for faults of nodes; a pod counts once."""
        for deletion in deletions:
            if deletion.reason in NODE_FAULTS:
                self._deleted.setdefault(deletion.uid, now)
