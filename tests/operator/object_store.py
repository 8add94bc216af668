"""An API server that keeps objects in memory, and one job with its reconciler on top of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Any

from prometheus_client import CollectorRegistry
from tests.operator.jobs import KEY, make_job

from fluxtrain_operator.base import names
from fluxtrain_operator.base.errors import ApiError
from fluxtrain_operator.base.job import Job, Manifest
from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.base.reports import MembersReport, Progress
from fluxtrain_operator.controller.api_client import SUPPORT_KINDS
from fluxtrain_operator.controller.cache import Cache
from fluxtrain_operator.controller.reconcile import Reconciler
from fluxtrain_operator.metrics import Metrics
from fluxtrain_operator.planner.guard import Delete
from fluxtrain_operator.planner.observed import is_controlled_by
from fluxtrain_operator.planner.plan import Event


def encoded(manifest: Manifest) -> Manifest:
    """Return a copy of ``manifest``, encoded as JSON on the way as in a request."""
    copied: Manifest = json.loads(json.dumps(manifest))
    return copied


class ObjectStore:
    """A KubernetesApi on objects in memory; it refuses to create the kinds in ``refuse``."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Manifest] = {}
        self.refuse: dict[str, ApiError] = {}
        self.served = frozenset[str]()
        self.events: list[Event] = []
        self.status: Manifest = {}
        self.num_tried = 0
        self._versions = count(1000)

    def put(self, kind: str, name: str, owner: Manifest | None = None, **metadata: Any) -> Manifest:
        """Add an object of another owner."""
        owners = [owner] if owner else []
        common = {"name": name, "namespace": "ns", "ownerReferences": owners, **metadata}
        manifest = {
            "kind": kind,
            "metadata": {"uid": f"of-{kind}-{name}", **common},
            "data": "theirs",
        }
        self.objects[kind, name] = manifest
        return manifest

    async def create(self, manifest: Manifest) -> Manifest | None:
        await asyncio.sleep(0)
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        self.num_tried += 1
        if kind in self.refuse:
            raise self.refuse[kind]
        if (kind, name) in self.objects:
            return None
        created = encoded(manifest)
        version = str(next(self._versions))
        created["metadata"] |= {"uid": f"uid-{version}", "resourceVersion": version}
        created["metadata"]["creationTimestamp"] = stamp(time.time())
        self.objects[kind, name] = created
        return created

    async def get(self, manifest: Manifest) -> Manifest | None:
        return self.objects.get((manifest["kind"], manifest["metadata"]["name"]))

    async def list_unwatched_pods(self, namespace: str) -> list[Manifest]:
        pods = await self.list_pods(namespace)
        return [pod for pod in pods if names.LABEL_JOB not in pod["metadata"]["labels"]]

    async def list_pods(self, namespace: str, selector: str = "") -> list[Manifest]:
        return [encoded(m) for (kind, _), m in self.objects.items() if kind == "Pod"]

    async def apply(self, manifest: Manifest, uid: str) -> Manifest | None:
        existing = self.objects.get((manifest["kind"], manifest["metadata"]["name"]))
        if existing is None or existing["metadata"]["uid"] != uid:
            return None
        metadata = existing["metadata"] | manifest["metadata"]
        existing |= encoded({**manifest, "metadata": metadata})
        return existing

    async def delete(self, namespace: str, deletion: Delete, version: str) -> Manifest | None:
        assert deletion.uid, "never by name alone"
        existing = self.objects.get((deletion.kind, deletion.name))
        if existing is not None and existing["metadata"]["uid"] == deletion.uid:
            del self.objects[deletion.kind, deletion.name]
        return None

    async def write_status(self, manifest: Mapping[str, Any], status: Manifest) -> Manifest:
        self.status = status
        metadata = {**manifest["metadata"], "resourceVersion": str(next(self._versions))}
        return {**manifest, "metadata": metadata, "status": status}

    async def kinds(self, version: str) -> frozenset[str]:
        return self.served

    async def create_event(self, job: Job, event: Event, now: float) -> None:
        if "Event" in self.refuse:
            raise self.refuse["Event"]
        self.events.append(event)

    async def fetch_members(self, address: str, port: int) -> MembersReport | None:
        return None

    async def fetch_progress(self, address: str, port: int) -> Progress | None:
        return None

    def condition(self, kind: str) -> tuple[str, str, str]:
        """Return status, reason and message of a condition."""
        (condition,) = (c for c in self.status["conditions"] if c["type"] == kind)
        return condition["status"], condition["reason"], condition.get("message", "")

    def warnings(self) -> list[str]:
        return [event.reason for event in self.events if event.type == "Warning"]

    def own(self, kind: str, uid: str = "uid-job") -> list[str]:
        """Return the names of the objects of ``kind`` that the job with ``uid`` controls."""
        return sorted(
            n for (k, n), m in self.objects.items() if k == kind and is_controlled_by(m, uid)
        )


class Harness:
    """One job, its reconciler, and the API server."""

    def __init__(
        self, cluster: ObjectStore | None = None, image: str = "trainer:1", **changes: Any
    ) -> None:
        self.cluster = cluster or ObjectStore()
        metrics = Metrics(CollectorRegistry())
        self.reconciler = Reconciler(
            Cache(),
            self.cluster,  # type: ignore[arg-type]
            metrics,
            image,
        )
        self.cache = self.reconciler.cache
        self.cache.set_job({**make_job(), **changes})

    def set_job(self, manifest: Manifest, version: str = "5000") -> None:
        """Replace the cached job."""
        manifest["metadata"]["resourceVersion"] = version
        self.cache.set_job(manifest)

    def sync(self) -> None:
        """Cache all objects, as the watches would."""
        for (kind, _), manifest in self.cluster.objects.items():
            if kind == "Pod":
                self.cache.set_pod(manifest)
            elif kind in SUPPORT_KINDS:
                self.cache.applied.set((SUPPORT_KINDS[kind], kind), manifest)

    def delete(self, kind: str, name: str) -> None:
        """Delete an object, and its copy in the cache, as a watch would."""
        manifest = self.cluster.objects.pop((kind, name))
        if kind == "Pod":
            self.cache.set_pod(manifest, deleted=True)
        else:
            self.cache.applied.remove((SUPPORT_KINDS[kind], kind), manifest)

    async def reconcile(self, times: int = 1) -> None:
        """Reconcile with all retries due, and again so that the status reports the result."""
        for _ in range(times):
            if (state := self.reconciler._states.get(KEY)) is not None:
                for name, failure in dict(state.create_failures).items():
                    state.create_failures[name] = replace(failure, retry_time=0.0)
            await self.reconciler.reconcile(KEY)
            await self.reconciler.reconcile(KEY)


def run(harness: Harness, *steps: Any) -> None:
    """Take ``steps``: callables, or numbers of reconciles."""

    async def main() -> None:
        async with asyncio.timeout(20):
            for step in steps:
                if isinstance(step, int):
                    await harness.reconcile(step)
                else:
                    step()
        await harness.reconciler.poller.close()

    asyncio.run(main())
