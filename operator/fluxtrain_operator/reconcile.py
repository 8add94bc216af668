"""Observe, plan, write the status, act: the sentence of the whole operator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from fluxtrain.contract.resource import KIND
from fluxtrain.contract.status import Status
from fluxtrain.errors import ConfigError
from fluxtrain_operator import names
from fluxtrain_operator.cluster import KINDS, Cluster
from fluxtrain_operator.errors import ApiError
from fluxtrain_operator.job import Job, Manifest
from fluxtrain_operator.metrics import Metrics
from fluxtrain_operator.observed import Observed
from fluxtrain_operator.plan import Delete, Plan, load, plan
from fluxtrain_operator.progress import Progress
from fluxtrain_operator.resources.pod_group import APIS
from fluxtrain_operator.status import finished, refused
from fluxtrain_operator.store import Store
from fluxtrain_operator.work_queue import Key

RELIST_SECONDS = 600.0
"""How often the objects around the pods are looked at anew: nobody watches them."""
PROGRESS_SECONDS = 10.0
"""How often a job that trains is asked for its progress."""
_SUPPORT = ("ConfigMap", "Service", "NetworkPolicy", "PodDisruptionBudget")
_GROUPS = {"native": ("Workload", "PodGroup")}


@dataclass
class Applied:
    """What is known of the objects around a job's pods."""

    hashes: dict[tuple[str, str], str]
    read: float


@dataclass
class Reconciler:
    """Brings what there is of a job to what it should be; one at a time for each job."""

    store: Store
    cluster: Cluster
    metrics: Metrics
    default_image: str
    _applied: dict[str, Applied] = field(default_factory=dict)
    _served: dict[str, bool] = field(default_factory=dict)

    async def reconcile(self, key: Key) -> float | None:
        """Do what is due for the job; return the seconds after which to look again, or None."""
        manifest = self.store.job(key)
        if manifest is None:
            self.metrics.forget(key)
            return None
        with self.metrics.reconcile_seconds.time():
            if _not_ours(manifest):
                self._applied.pop(manifest["metadata"]["uid"], None)
                return None
            try:
                job = load(manifest, self.default_image)
            except ConfigError as error:
                await self._refuse(manifest, error)
                return None
            observed = await self._observe(key, job)
            decided = plan(job, observed, time.time())
            await self._carry_out(manifest, job, decided)
            self.metrics.observe(key, job, decided)
            return _next_look(decided)

    async def _refuse(self, manifest: Mapping[str, Any], error: ConfigError) -> None:
        before = Status.model_validate(manifest.get("status") or {})
        generation = manifest["metadata"].get("generation", 1)
        after = refused(before, generation, error, time.time())
        if after != before:
            await self._write_status(manifest, after)

    async def _observe(self, key: Key, job: Job) -> Observed:
        if finished(job.status):
            return Observed.from_objects(self.store.pods(key))
        kinds = await self._kinds(job)
        pods = self.store.pods(key)
        missing = {version for version, served in self._served.items() if not served}
        return Observed.from_objects(
            pods,
            progress=await self._progress(job, pods),
            nodes=self.store.nodes,
            complete_jobs=self._complete_jobs(job.namespace),
            applied=await self._hashes(job, kinds),
            missing_apis=frozenset(missing),
        )

    async def _kinds(self, job: Job) -> dict[str, str]:
        """Return the kinds, with their API versions, of the objects around the job's pods."""
        kinds = {kind: KINDS[kind] for kind in _SUPPORT}
        gang = job.spec.scheduling.gang
        if (version := APIS.get(gang)) is not None:
            if version not in self._served:
                self._served[version] = await self.cluster.serves(version)
            if self._served[version]:
                kinds |= dict.fromkeys(_GROUPS.get(gang, ("PodGroup",)), version)
        return kinds

    async def _hashes(self, job: Job, kinds: Mapping[str, str]) -> dict[tuple[str, str], str]:
        known, now = self._applied.get(job.uid), time.monotonic()
        if known is None or now - known.read > RELIST_SECONDS:
            known = Applied(await self.cluster.applied(job, kinds), now)
            self._applied[job.uid] = known
        return dict(known.hashes)

    async def _progress(self, job: Job, pods: list[Mapping[str, Any]]) -> Progress | None:
        """Return what rank 0 says; it may be in any of the pods."""
        addresses = [
            str(pod["status"]["podIP"])
            for pod in pods
            if pod.get("status", {}).get("phase") == "Running" and pod["status"].get("podIP")
        ]
        asked = [self.cluster.progress(address, job.metrics_port) for address in addresses]
        answers = await asyncio.gather(*asked)
        return next((answer for answer in answers if answer is not None), None)

    def _complete_jobs(self, namespace: str) -> frozenset[str]:
        return frozenset(
            str(job["metadata"]["name"])
            for job in self.store.jobs()
            if job["metadata"].get("namespace") == namespace
            and (job.get("status") or {}).get("phase") == "Complete"
        )

    async def _carry_out(self, manifest: Mapping[str, Any], job: Job, decided: Plan) -> None:
        """Write the status, delete, create, tell: in this order, so that no count is ever lost.

        An equal status is written as well where something is to be done: the server refuses it where the
        job has changed since it was read, and then what was planned is not done.
        """
        if decided.status != job.status or decided.delete or decided.create:
            await self._write_status(manifest, decided.status)
        for what in decided.delete:
            await self._delete(job, what)
        for wanted in decided.create:
            await self._create(job, wanted)
        for event in decided.events:
            await self.cluster.post_event(job, event, time.time())

    async def _write_status(self, manifest: Mapping[str, Any], after: Status) -> None:
        status = after.model_dump(mode="json", by_alias=True, exclude_none=True)
        self.store.set_job(await self.cluster.write_status(manifest, status))

    async def _delete(self, job: Job, what: Delete) -> None:
        version = KINDS.get(what.kind) or APIS[job.spec.scheduling.gang]
        left = await self.cluster.delete(job.namespace, what, version)
        if what.kind == "Pod" and left is not None and left.get("kind") == "Pod":
            self.store.set_pod(left)
        elif what.kind != KIND and (known := self._applied.get(job.uid)) is not None:
            known.hashes.pop((what.kind, what.name), None)

    async def _create(self, job: Job, wanted: Manifest) -> None:
        if wanted["kind"] == "Pod":  # never changed once made, so never applied over another
            made = await self.cluster.create(wanted)
            if made is not None:
                self.store.set_pod(made)
            return
        made = await self.cluster.apply(wanted)
        hashed = wanted["metadata"]["annotations"][names.ANNOTATION_APPLIED]
        self._applied[job.uid].hashes[wanted["kind"], made["metadata"]["name"]] = hashed


def _not_ours(manifest: Mapping[str, Any]) -> bool:
    """Return whether a job is going, or is somebody else's: then even its mistakes are not for us to tell."""
    managed_by = manifest.get("spec", {}).get("managedBy", names.MANAGED_BY)
    return "deletionTimestamp" in manifest["metadata"] or managed_by != names.MANAGED_BY


def lost_race(error: Exception) -> bool:
    """Return whether ``error`` only means that somebody else wrote first: look again, say nothing."""
    return isinstance(error, ApiError) and error.status == HTTPStatus.CONFLICT


def _next_look(decided: Plan) -> float | None:
    """Return when to look again: while a job trains, its progress has to be asked for."""
    training = decided.status.phase in ("Starting", "Running", "Restarting")
    times = [decided.requeue_after, PROGRESS_SECONDS if training else None]
    return min((time for time in times if time is not None), default=None)
