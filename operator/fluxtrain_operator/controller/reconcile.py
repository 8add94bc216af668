"""Observe, plan, write the status, act: the sentence of the whole operator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any

from fluxtrain.contract.resource.fluxtraining import KIND
from fluxtrain.contract.resource.status import Status, preserve_unknown_fields, read_status
from fluxtrain.errors import ConfigError
from fluxtrain_operator import names
from fluxtrain_operator.controller.api_client import KINDS, SUPPORT, KubernetesApi
from fluxtrain_operator.controller.cache import Applied, Cache
from fluxtrain_operator.controller.progress_poller import ProgressPoller
from fluxtrain_operator.errors import ApiError, UnreadableError
from fluxtrain_operator.job import Job, Manifest
from fluxtrain_operator.metrics import Metrics
from fluxtrain_operator.names import Key
from fluxtrain_operator.planner.observed import Observed
from fluxtrain_operator.planner.obstacles import Blocker, is_refusal, refused, taken
from fluxtrain_operator.planner.owners import is_of
from fluxtrain_operator.planner.plan import Delete, Plan, load, plan, refuse
from fluxtrain_operator.planner.situation import earliest
from fluxtrain_operator.planner.status import finished
from fluxtrain_operator.resources.pod_group import APIS

RELIST_SECONDS = 600.0
"""How often all of a job's objects are looked at anew: no watch tells of everything."""
COUNT_SECONDS = 3.0
"""Between two writes of a status that differ only in the number of nodes."""
_NEVER = float("-inf")
_GROUPS = {"native": ("Workload", "PodGroup")}


_PODS_AT_A_TIME = 16
"""Requests to create pods that are under way together, so that other jobs get theirs in between."""

Name = tuple[str, str]
"""Kind and name of an object in the job's namespace."""


@dataclass
class Memory:
    """What is remembered of a job between its reconciles; times are of the monotonic clock."""

    uid: str
    written: float = float("-inf")
    """When its status was written last."""
    listed: float | None = None
    """When the objects around its pods were looked at last."""
    applied: dict[Name, Applied] = field(default_factory=dict)
    """Those objects as they were found or made."""
    obstacles: dict[Name, Blocker] = field(default_factory=dict)
    """Why objects could not be made when that was tried last."""


@dataclass
class Reconciler:
    """Brings what there is of a job to what it should be; one at a time for each job."""

    store: Cache
    cluster: KubernetesApi
    metrics: Metrics
    default_image: str
    look_again: Callable[[Key], None] = lambda key: None
    """Called with a job whose trainers have said something new."""
    device_groups: tuple[int, ...] = ()
    """Supplemental groups of training pods that have GPUs."""
    _memories: dict[Key, Memory] = field(default_factory=dict)
    _served: dict[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Ask the trainers through ``cluster``."""
        self.answers = ProgressPoller(self.store, self.cluster.progress, self.look_again)

    async def reconcile(self, key: Key) -> float | None:
        """Do what is due for the job; return the seconds after which to look again, or None."""
        manifest = self.store.job(key)
        if manifest is None or _not_ours(manifest):
            self._forget(key)
            return None
        with self.metrics.reconcile_seconds.time():
            try:
                job = load(manifest, self.default_image)
            except ConfigError as error:
                return await self._refuse(key, manifest, error)
            if self.device_groups:
                job = replace(job, device_groups=self.device_groups)
            memory = self._memory(key, job.uid)
            observed = await self._observe(key, job, memory)
            decided = plan(job, observed, time.time())
            seconds = can_wait(job.status, decided, memory, time.monotonic())
            if seconds is not None:
                return earliest([seconds, decided.requeue_after])
            before = dict(memory.obstacles)
            await self._carry_out(manifest, job, decided, memory)
            self._follow(key, job, decided)
            self.metrics.observe(key, job, decided)
            if memory.obstacles != before:
                return 0.0  # to tell of it
            return self._next_look(job, decided)

    def _next_look(self, job: Job, decided: Plan) -> float | None:
        """Return the seconds after which to look again; at those that have pods, always some day."""
        if finished(decided.status) or decided.status.phase == "Suspended":
            return decided.requeue_after
        return earliest([decided.requeue_after, RELIST_SECONDS])

    def _memory(self, key: Key, uid: str) -> Memory:
        known = self._memories.get(key)
        if known is None or known.uid != uid:
            known = self._memories[key] = Memory(uid)
        return known

    def _forget(self, key: Key) -> None:
        """Drop all that is remembered of a job that is no more, or not ours."""
        self.metrics.forget(key)
        self.answers.leave(key)
        self._memories.pop(key, None)

    def _follow(self, key: Key, job: Job, decided: Plan) -> None:
        """Have the trainers asked for their progress, as long as there are any."""
        if decided.status.phase in ("Starting", "Running", "Restarting"):
            self.answers.follow(key, job.metrics_port)
        else:
            self.answers.leave(key)

    async def _refuse(
        self, key: Key, manifest: Mapping[str, Any], error: ConfigError
    ) -> float | None:
        decided = refuse(manifest, error, time.time())
        if decided.status != read_status(manifest.get("status")):
            await self._write_status(manifest, decided.status)
        self.metrics.is_in(key, decided.status.phase)
        for what in decided.delete:
            await self.cluster.delete(key[0], what, KINDS[what.kind])
        again = RELIST_SECONDS if isinstance(error, UnreadableError) else None
        return earliest([decided.requeue_after, again])

    async def _observe(self, key: Key, job: Job, memory: Memory) -> Observed:
        if finished(job.status):
            return Observed.from_objects(self.store.pods(key))
        kinds = await self._kinds(job)
        missing = {version for version, served in self._served.items() if not served}
        await self._look(job, kinds, memory)
        return Observed.from_objects(
            self.store.pods(key),
            progress=self.answers.last(key),
            witness=self.answers.witness(key),
            nodes=self.store.nodes,
            jobs_before=self._jobs_before(job),
            applied={name: found.hashed for name, found in memory.applied.items()},
            obstacles=(*memory.obstacles.values(), *self._strangers(key, job)),
            missing_apis=frozenset(missing),
        )

    def _strangers(self, key: Key, job: Job) -> Iterator[Blocker]:
        """Yield those pods that are known to have the job's label, and are not its own."""
        for found in self.store.strangers(key):
            yield taken("Pod", found, job.name)

    async def _kinds(self, job: Job) -> dict[str, str]:
        """Return the kinds, with their API versions, of the objects around the job's pods."""
        kinds = dict(SUPPORT)
        gang = job.spec.scheduling.gang
        if (version := APIS.get(gang)) is not None:
            if version not in self._served:
                self._served[version] = await self.cluster.serves(version)
            if self._served[version]:
                kinds |= dict.fromkeys(_GROUPS.get(gang, ("PodGroup",)), version)
        return kinds

    async def _look(self, job: Job, kinds: Mapping[str, str], memory: Memory) -> None:
        """Look at what no watch tells, once in a while: the objects around the pods.

        Mostly those of all jobs were listed together. A new job is known to have none.
        """
        now, listed = time.monotonic(), self.store.support
        if memory.listed is None and job.status.phase is None:
            memory.listed = now
        if listed.at > max(memory.listed or _NEVER, memory.written):
            others = {kind: version for kind, version in kinds.items() if kind not in SUPPORT}
            rest = await self.cluster.applied(job, others) if others else {}
            memory.applied = listed.of(job.namespace, job.uid) | rest
            memory.listed = listed.at
        elif memory.listed is None or now - memory.listed > RELIST_SECONDS:
            memory.applied, memory.listed = await self.cluster.applied(job, kinds), now

    def _jobs_before(self, job: Job) -> dict[str, str]:
        """Return the phases of those jobs that exist of the ones that ``job`` starts after."""
        wanted = job.spec.lifecycle.start_after
        found = {name: self.store.job((job.namespace, name)) for name in wanted}
        return {
            name: str((before.get("status") or {}).get("phase", ""))
            for name, before in found.items()
            if before is not None
        }

    async def _carry_out(
        self, manifest: Mapping[str, Any], job: Job, decided: Plan, memory: Memory
    ) -> None:
        """Write the status, delete, create, tell: in this order, so that no count is ever lost.

        An equal status is written as well where something is to be done: the server refuses it where the
        job has changed since it was read, and then what was planned is not done.
        """
        if decided.status != job.status or decided.delete or decided.create:
            await self._write_status(manifest, decided.status)
            memory.written = time.monotonic()
        await _together(self._delete(job, what, memory) for what in decided.delete)
        pods = [wanted for wanted in decided.create if wanted["kind"] == "Pod"]
        support = [wanted for wanted in decided.create if wanted["kind"] != "Pod"]
        await _together(self._make(job, wanted, memory) for wanted in support)
        if not any(_name(wanted) in memory.obstacles for wanted in support):  # pods mount some
            await self._make_pods(job, pods, memory)
        for event in decided.events:
            await self.cluster.post_event(job, event, time.time())

    async def _write_status(self, manifest: Mapping[str, Any], after: Status) -> None:
        known = after.model_dump(mode="json", by_alias=True, exclude_none=True)
        status = preserve_unknown_fields(manifest.get("status"), known)
        try:
            self.store.set_job(await self.cluster.write_status(manifest, status))
        except ApiError as error:
            if error.status == HTTPStatus.NOT_FOUND:  # it went while there was no watch
                self.store.set_job(manifest, gone=True)
            raise

    async def _delete(self, job: Job, what: Delete, memory: Memory) -> None:
        """Delete an object, only if it still is the one that is known as the job's own."""
        if what.kind not in ("Pod", KIND):
            what = replace(what, uid=memory.applied.pop((what.kind, what.name)).uid)
        version = KINDS.get(what.kind) or APIS[job.spec.scheduling.gang]
        left = await self.cluster.delete(job.namespace, what, version)
        key = job.namespace, job.name
        if what.kind == "Pod" and left is None:
            self.store.drop_pod(key, what.uid)
        elif left is not None and left.get("kind") == "Pod":
            self.store.update_pod(key, left)

    async def _make_pods(self, job: Job, pods: list[Manifest], memory: Memory) -> None:
        """Create ``pods`` some at a time; where some are refused, the others would be as well."""
        for start in range(0, len(pods), _PODS_AT_A_TIME):
            some = pods[start : start + _PODS_AT_A_TIME]
            await _together(self._make(job, pod, memory) for pod in some)
            found = (memory.obstacles.get(_name(pod)) for pod in some)
            refusal = next((o for o in found if o is not None and not o.is_taken), None)
            if refusal is not None:
                left = pods[start + _PODS_AT_A_TIME :]
                memory.obstacles |= {_name(pod): refusal.of(pod) for pod in left}
                return

    async def _make(self, job: Job, wanted: Manifest, memory: Memory) -> None:
        """Create an object, or change the job's own; remember what keeps it from being made."""
        name = _name(wanted)
        before = memory.obstacles.pop(name, None)
        try:
            obstacle = await self._create_or_change(job, wanted, memory)
        except ApiError as error:
            if not is_refusal(error):
                raise
            obstacle = refused(wanted, error)
        if obstacle is not None:
            memory.obstacles[name] = obstacle.after(before, time.time())

    async def _create_or_change(self, job: Job, wanted: Manifest, memory: Memory) -> Blocker | None:
        """Make ``wanted``; return what has its name where that is not the job's.

        An object is created where none is known, and otherwise changed only where it still is the known
        one; a pod is never changed. So nothing of anybody else is ever written over.
        """
        known = memory.applied.get(_name(wanted))
        if known is not None:
            self._remember(await self.cluster.apply(wanted, known.uid), wanted, memory)
            return None
        made = await self.cluster.create(wanted)
        if made is None:
            made = await self.cluster.find(wanted)
            if made is not None and not is_of(made, job.uid):
                return taken(wanted["kind"], made, job.name)
        self._remember(made, wanted, memory)
        return None

    def _remember(self, found: Manifest | None, wanted: Manifest, memory: Memory) -> None:
        """Note what there is of ``wanted`` now; None: it went meanwhile."""
        if found is None:
            memory.applied.pop(_name(wanted), None)
            raise ApiError(HTTPStatus.CONFLICT, f"{' '.join(_name(wanted))} went, or is another")
        if wanted["kind"] == "Pod":
            self.store.set_pod(found)
        else:
            memory.applied[_name(wanted)] = Applied.of(found)


def _name(manifest: Mapping[str, Any]) -> Name:
    return manifest["kind"], manifest["metadata"]["name"]


async def _together(requests: Iterable[Awaitable[None]]) -> None:
    """Await ``requests`` side by side, all to their end; then raise what the first failed one raised."""
    done = await asyncio.gather(*requests, return_exceptions=True)
    for error in done:
        if error is not None:
            raise error


def can_wait(before: Status, decided: Plan, memory: Memory, now: float) -> float | None:
    """Return the seconds after which to write a status that only tells of more pods; None: now.

    So one write tells of several pods that come up one after the other.
    """
    due = memory.written + COUNT_SECONDS - now
    busy = decided.delete or decided.create or decided.events
    if due <= 0 or busy or decided.status == before:
        return None
    return due if _counts_only(before, decided.status) else None


def _counts_only(before: Status, after: Status) -> bool:
    """Return whether two statuses differ only in how many nodes are ready, and in what is said of it."""
    kept = {"nodes": before.nodes, "conditions": before.conditions}
    facts = [[(c.type, c.status) for c in status.conditions] for status in (before, after)]
    desired = [status.nodes and status.nodes.desired for status in (before, after)]
    return (
        facts[0] == facts[1]
        and desired[0] == desired[1]
        and after.model_copy(update=kept) == before
    )


def _not_ours(manifest: Mapping[str, Any]) -> bool:
    """Return whether a job is going, or is somebody else's: then even its mistakes are not for us to tell."""
    managed_by = manifest.get("spec", {}).get("managedBy", names.MANAGED_BY)
    return "deletionTimestamp" in manifest["metadata"] or managed_by != names.MANAGED_BY


def is_conflict(error: Exception) -> bool:
    """Return whether ``error`` only means that somebody else wrote first: look again, say nothing."""
    return isinstance(error, ApiError) and error.status == HTTPStatus.CONFLICT
