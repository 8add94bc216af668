"""Reconcile a job: observe, plan, act."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any

from fluxtrain.contract.resource.status import read_status
from fluxtrain.errors import ConfigError
from fluxtrain_operator.base import names
from fluxtrain_operator.base.errors import ApiError, UnreadableError
from fluxtrain_operator.base.job import Job, Revision
from fluxtrain_operator.base.names import Key, earliest, items, mapping
from fluxtrain_operator.base.node_health import Distrust
from fluxtrain_operator.base.settings import (
    DEFAULT_POLICY,
    NO_DEFAULTS,
    NO_RULES,
    JobPolicy,
    NetworkRules,
    PodDefaults,
)
from fluxtrain_operator.controller.api_client import KINDS, SUPPORT_KINDS, KubernetesApi
from fluxtrain_operator.controller.cache import Cache, Name
from fluxtrain_operator.controller.executor import (
    NEVER,
    Executor,
    FaultBudget,
    JobState,
    log_decision,
    status_delay,
)
from fluxtrain_operator.controller.pollers import MembersPoller, ProgressPoller
from fluxtrain_operator.metrics import Metrics
from fluxtrain_operator.planner.groups import FAILED
from fluxtrain_operator.planner.observed import Observed, is_controlled_by
from fluxtrain_operator.planner.plan import (
    Plan,
    load,
    plan_invalid,
    revision_of_pods,
    revision_to_read,
)
from fluxtrain_operator.planner.plan import plan as make_plan
from fluxtrain_operator.planner.status import finished
from fluxtrain_operator.resources.scheduling import NO_STATE, POD_GROUP, Gang, GroupState, gang_of

RESYNC_SECONDS = 600.0
"""Maximum interval of the reconciles of a job with pods."""
_GROUPS_SECONDS = 0.5
"""Until the next look at whether the pod groups of a scheduler are cached."""
_PATIENCE_SECONDS = 15.0
"""After the first look, until it is reported that they are not."""
_KINDS_SECONDS = 5.0
"""Until the API server is asked again which kinds it serves: an API may be installed or removed."""


@dataclass
class Reconciler:
    """Moves the objects of a job to their desired state; must not run twice at a time for a job."""

    cache: Cache
    api: KubernetesApi
    metrics: Metrics
    default_image: str
    enqueue: Callable[[Key], None] = lambda key: None
    """Called with a job whose progress has changed."""
    has_groups: Callable[[str], bool] = lambda version: True
    """Returns whether the pod groups of an API version are cached."""
    rendezvous_image: str = ""
    pod_defaults: PodDefaults = NO_DEFAULTS
    job_policy: JobPolicy = DEFAULT_POLICY
    network_rules: NetworkRules = NO_RULES
    fault_budget: FaultBudget = field(default_factory=FaultBudget)
    """Shared by all jobs."""
    admit: Callable[[str], Awaitable[float]] | None = None
    """Returns 0 if the jobs of a namespace can be reconciled, else the seconds until the next try."""
    _states: dict[Key, JobState] = field(default_factory=dict)
    _kinds: dict[str, tuple[float, frozenset[str]]] = field(default_factory=dict)
    """When the kinds of an API version were asked for, and which are served."""
    _groups_awaited: dict[str, float] = field(default_factory=dict)
    """Since when the pod groups of an API version should be cached."""
    _jobs: dict[Key, tuple[tuple[object, object], Job]] = field(default_factory=dict)
    """Loaded jobs with their uids and specs."""

    def __post_init__(self) -> None:
        self.executor = Executor(self.cache, self.api)
        self.poller = ProgressPoller(self.cache, self.api.fetch_progress, self.enqueue)
        self.metrics.watch_distrust(self._distrust)
        self.members = MembersPoller(self.cache, self.api.fetch_members, self.enqueue)

    async def reconcile(self, key: Key) -> float | None:
        """Take the next actions for a job; return the seconds after which to requeue it, or None."""
        manifest = self.cache.job(key)
        if manifest is None or is_ignored(manifest):
            self._forget(key)
            return None
        if self.admit and (left := await self.admit(key[0])):
            self._forget(key)
            return left
        with self.metrics.reconcile_seconds.time():
            try:
                job = self._load(key, manifest)
            except ConfigError as error:
                return await self._refuse(key, manifest, error)
            return await self._reconcile(key, manifest, job, self._state(key, job.uid))

    async def _reconcile(
        self, key: Key, manifest: Mapping[str, Any], job: Job, state: JobState
    ) -> float | None:
        if not await self._knows_groups(job, state):
            return _GROUPS_SECONDS
        observed = await self._observe(key, job, state)
        stops = job.spec.lifecycle.suspend or finished(job.status)
        if stops and not state.has_searched:
            lost = await self.executor.unwatched_pods(job)
            failures = (*observed.create_failures, *lost)
            observed = replace(observed, create_failures=failures)
        now = time.monotonic()  # nothing is awaited until the plan's deletions are counted
        left = self.fault_budget.left(self.cache.num_pods, now)
        plan = make_plan(job, replace(observed, disruptions_left=left), time.time())
        self.fault_budget.record(plan.delete, now)
        delay = status_delay(job.status, plan, state, time.monotonic())
        if delay is not None:
            return earliest([delay, plan.requeue_after])
        create_failures = dict(state.create_failures)
        await self.executor.execute(manifest, job, plan, state)
        state.has_searched = stops
        if _can_answer(job, plan):
            self.poller.start(key, job.metrics_port)
            self.members.start(key, job.metrics_port)
        else:
            self._stop_polling(key)
        self.metrics.record_plan(key, job, plan)
        if finished(plan.status):
            self._jobs.pop(key, None)
        if state.create_failures != create_failures:
            return 0.0  # the status must report them
        return _requeue_after(plan)

    def _load(self, key: Key, manifest: Mapping[str, Any]) -> Job:
        """Return the job in ``manifest``; what follows from its spec is computed once."""
        identity = manifest["metadata"].get("uid"), manifest.get("spec")
        known = self._jobs.get(key)
        if known is not None and known[0] == identity:
            return known[1].with_status(manifest)
        settings = self.default_image, self.rendezvous_image, self.pod_defaults, self.job_policy
        job = load(manifest, *settings, self.network_rules)
        self._jobs[key] = identity, job
        return job

    def _state(self, key: Key, uid: str) -> JobState:
        state = self._states.get(key)
        if state is None or state.uid != uid:
            state = self._states[key] = JobState(uid)
        return state

    def _forget(self, key: Key) -> None:
        """Drop the state of a job that is deleted or not managed by this operator."""
        self.metrics.remove_job(key)
        self._stop_polling(key)
        self._states.pop(key, None)
        self._jobs.pop(key, None)

    def _stop_polling(self, key: Key) -> None:
        self.poller.stop(key)
        self.members.stop(key)

    async def _refuse(
        self, key: Key, manifest: Mapping[str, Any], error: ConfigError
    ) -> float | None:
        """Report an invalid spec; return the seconds after which to requeue the job, or None."""
        uid = str(manifest["metadata"].get("uid", ""))
        applied = self._applied_hashes(uid, SUPPORT_KINDS)
        observed = Observed.from_objects(self.cache.pods(key), applied=applied)
        plan = plan_invalid(manifest, error, observed, time.time())
        before = read_status(manifest.get("status"))
        if plan.status != before:
            await self.executor.write_status(manifest, plan.status)
        log_decision(manifest, before, plan)
        self.metrics.record_refusal(key, plan.status.phase)
        for deletion in plan.delete:
            await self.executor.delete(key, uid, deletion, KINDS[deletion.kind])
        retry = RESYNC_SECONDS if isinstance(error, UnreadableError) else None
        return earliest([plan.requeue_after, retry])

    async def _observe(self, key: Key, job: Job, state: JobState) -> Observed:
        gang = gang_of(job)
        kinds = SUPPORT_KINDS | {POD_GROUP: gang.api_version}
        applied = self._applied_hashes(job.uid, kinds)
        if finished(job.status):
            awaited = is_awaited(self.cache, key)
            return Observed.from_objects(self.cache.pods(key), applied=applied, is_awaited=awaited)
        observed = Observed.from_objects(
            self.cache.pods(key),
            final_pod=self.cache.final_pod(key),
            gone=self.cache.gone_pods(key),
            progress=self.poller.rank_0(key),
            any_progress=self.poller.lowest_rank(key),
            heard=self.members.heard(key),
            nodes=self.cache.nodes,
            distrust=self._distrust(),
            predecessors=phases_of_predecessors(self.cache, job),
            cycle=cycle_of(self.cache, key) if job.spec.lifecycle.start_after else (),
            applied=applied,
            group_state=self._group_state(job, gang),
        )
        name = revision_to_read(job, observed, time.time())
        if name is not None:
            stored = await self._read_revision(job, name, state)
            observed = replace(observed, revision=stored)
        if not (state.create_failures or self.cache.foreign_pods(key)):
            return observed
        revision = revision_of_pods(job, observed, time.time())
        foreign = await self.executor.foreign_pods(job, revision, state)
        return replace(observed, create_failures=(*state.create_failures.values(), *foreign))

    def _applied_hashes(self, uid: str, kinds: Mapping[str, str]) -> dict[Name, str]:
        applied = self.cache.applied.of(uid, kinds)
        return {name: known.applied_hash for name, known in applied.items()}

    def _distrust(self) -> Distrust:
        return self.cache.fault_history.distrust(time.time())

    async def _read_revision(self, job: Job, name: str, state: JobState) -> Revision | None:
        """Return the revision of the job; None if it is gone, changed or another owner's."""
        if state.revision is None or state.revision.name != name:
            metadata = {"name": name, "namespace": job.namespace}
            sought = {"apiVersion": KINDS["ConfigMap"], "kind": "ConfigMap", "metadata": metadata}
            stored = await self.api.get(sought)
            own = stored is not None and is_controlled_by(stored, job.uid)
            state.revision = Revision.from_object(job.name, stored) if stored and own else None
        return state.revision

    async def _knows_groups(self, job: Job, state: JobState) -> bool:
        """Return whether the job's pod groups are cached, or cannot be: then ``state`` says why."""
        gang, now = gang_of(job), time.monotonic()
        version = gang.api_version
        if not version or finished(job.status):
            return True
        problem, served = "", await self._served_kinds(version, now)
        if POD_GROUP not in served:
            problem = f"the cluster does not serve {POD_GROUP} of {version}"
            self._groups_awaited.pop(version, None)
        elif not self.has_groups(version):
            if now < self._groups_awaited.setdefault(version, now) + _PATIENCE_SECONDS:
                return False
            problem = "the operator cannot list these; does the chart's value gangs permit it?"
        for manifest in gang.objects(job):
            state.note_pod_group(manifest, problem, time.time())
        return True

    async def _served_kinds(self, version: str, now: float) -> frozenset[str]:
        time_asked, served = self._kinds.get(version, (NEVER, frozenset()))
        if now >= time_asked + _KINDS_SECONDS:
            served = await self.api.kinds(version)
            self._kinds[version] = now, served
        return served

    def _group_state(self, job: Job, gang: Gang) -> GroupState:
        kind = gang.api_version, POD_GROUP
        applied = self.cache.applied.get(job.uid, kind, names.pod_group(job.name))
        return NO_STATE if applied is None else applied.state


def _can_answer(job: Job, plan: Plan) -> bool:
    """Return whether trainers may answer: also those of a job that waits for its rendezvous pod alone."""
    status = plan.status
    if status.phase == "Pending":
        return status.nodes is not None and status.nodes.ready >= job.spec.nodes.min
    return status.phase in ("Starting", "Running", "Restarting")


def _requeue_after(plan: Plan) -> float | None:
    """Return the seconds after which to requeue a job: one with pods at least every RESYNC_SECONDS."""
    if finished(plan.status) or plan.status.phase == "Suspended":
        return plan.requeue_after
    return earliest([plan.requeue_after, RESYNC_SECONDS])


def is_conflict(error: Exception) -> bool:
    """Return whether another client wrote first: the job is reconciled again, nothing is reported."""
    return isinstance(error, ApiError) and error.status == HTTPStatus.CONFLICT


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
    return any(_waits_for(job, key[1], has_failed) for job in jobs if job is not None)


def cycle_of(cache: Cache, key: Key) -> tuple[str, ...]:
    """Return the shortest chain of jobs that wait for one another, from a job to itself.

    It is empty if there is none, or none among the first `_MAX_JOBS`.
    """
    namespace, start = key
    known: set[str] = set()
    chains: deque[tuple[str, ...]] = deque([(start,)])
    while chains and len(known) < _MAX_JOBS:
        chain = chains.popleft()
        for predecessor in _awaited(cache.job((namespace, chain[-1]))):
            if predecessor == start:
                return (*chain, start)
            if predecessor not in known:
                known.add(predecessor)
                chains.append((*chain, predecessor))
    return ()


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


def _waits_for(manifest: Mapping[str, Any], predecessor: str, has_failed: bool) -> bool:
    """Return whether a job that starts after ``predecessor`` has not begun, nor seen that it is complete."""
    if has_failed and mapping(mapping(manifest, "spec"), "lifecycle").get("startWhen") != "Ended":
        return False
    status = read_status(manifest.get("status"))
    has_seen = status.attempt > 0 or predecessor in status.completed_predecessors
    return not (has_seen or finished(status) or is_ignored(manifest))


def is_ignored(manifest: Mapping[str, Any]) -> bool:
    """Return whether a job is being deleted or has another manager: then not even errors are reported."""
    managed_by = manifest.get("spec", {}).get("managedBy", names.MANAGED_BY)
    return "deletionTimestamp" in manifest["metadata"] or managed_by != names.MANAGED_BY
