"""Informers: keep the cache of jobs, pods, nodes and supporting objects in sync with the API server.

A namespace is served once all its objects are cached, and while its lists and watches are not refused: its
trouble concerns no other namespace.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from kubernetes.aio.client import ApiClient

from fluxtrain.contract.resource.fluxtraining import KIND
from fluxtrain_operator.base import names
from fluxtrain_operator.base.names import Key
from fluxtrain_operator.controller.api_client import KINDS, SUPPORT_KINDS, collection
from fluxtrain_operator.controller.cache import Cache, Kind, Manifest
from fluxtrain_operator.controller.kept_fields import NodeFields, ObjectFields, PodFields
from fluxtrain_operator.controller.list_watch import (
    RELIST_SECONDS,
    EventHandler,
    ListWatch,
    UnreadableObjects,
    is_refused,
    list_and_watch,
)
from fluxtrain_operator.metrics import Metrics
from fluxtrain_operator.resources.scheduling import POD_GROUP, Volcano

SELECTOR = names.LABEL_JOB
METADATA_RELIST_SECONDS = 3600.0
"""Interval of full lists of supporting objects, even if no watch was lost."""
_SYNC_POLL_SECONDS = 0.1
_PATIENCE_SECONDS = 10.0
_NOT_CACHED = "its objects are not cached yet"
JOB: Kind = (KINDS[KIND], KIND)
POD: Kind = ("v1", "Pod")


@dataclass
class _Handler:
    """Enqueues the jobs whose cached objects changed."""

    kind: Kind
    cache: Cache
    metrics: Metrics
    unreadable: UnreadableObjects
    enqueue: Callable[[Key], None]
    namespace: str = ""
    """Whose objects these are; empty: those of all namespaces, or of none."""
    synced: asyncio.Event = field(default_factory=asyncio.Event)
    refusal: str = ""
    """Why the API server refuses the list or watch; empty while it does not."""

    def on_activity(self) -> None:
        self.metrics.record_watch_event(self.kind[1].lower())
        self._set_failing(False)
        self.refusal = ""

    def on_failure(self, error: Exception) -> None:
        self._set_failing(True)
        if is_refused(error):
            self.refusal = str(error)

    def _set_failing(self, fails: bool) -> None:
        kind = self.kind[1].lower()
        self.metrics.failing_watches.labels(kind, self.namespace).set(fails)

    def on_unreadable(self, manifest: Manifest, error: Exception) -> None:
        self.unreadable.report(self.kind, manifest, error)

    def _enqueue_all(self, keys: Iterable[Key | None]) -> None:
        for key in keys:
            if key is not None:
                self.enqueue(key)


@dataclass
class _JobHandler(_Handler):
    """Caches jobs."""

    def on_upsert(self, manifest: Manifest) -> None:
        is_own_write = self.cache.has_version(manifest)
        key = self.cache.set_job(manifest)
        self._enqueue_all([*([] if is_own_write else [key]), *self.cache.jobs_after(key)])

    def on_delete(self, manifest: Manifest) -> None:
        key = self.cache.set_job(manifest, deleted=True)
        self._enqueue_all([key, *self.cache.jobs_after(key)])

    def on_replace(self, uids: set[str], version: int) -> None:
        for key in self.cache.retain_jobs(uids, version, self.namespace):
            self._enqueue_all([key, *self.cache.jobs_after(key)])
        self.synced.set()


@dataclass
class _PodHandler(_Handler):
    """Caches pods."""

    def on_upsert(self, manifest: Manifest) -> None:
        self._enqueue_all([self.cache.set_pod(manifest)])

    def on_delete(self, manifest: Manifest) -> None:
        self._enqueue_all([self.cache.set_pod(manifest, deleted=True)])

    def on_replace(self, uids: set[str], version: int) -> None:
        self._enqueue_all(self.cache.retain_pods(uids, version, self.namespace))
        self.synced.set()


@dataclass
class _NodeHandler(_Handler):
    """Caches nodes."""

    _names: dict[str, str] = field(default_factory=dict)
    """By uid."""

    def on_upsert(self, manifest: Manifest) -> None:
        metadata = manifest["metadata"]
        self._names[str(metadata.get("uid", ""))] = str(metadata["name"])
        self._enqueue_all(self.cache.set_node(manifest))

    def on_delete(self, manifest: Manifest) -> None:
        self._names.pop(str(manifest["metadata"].get("uid", "")), None)
        self._enqueue_all(self.cache.set_node(manifest, deleted=True))

    def on_replace(self, uids: set[str], version: int) -> None:
        existing = {name for uid, name in self._names.items() if uid in uids}
        for uid in self._names.keys() - uids:
            name = self._names.pop(uid)
            if name not in existing:  # otherwise a new node has the name
                self._enqueue_all(self.cache.set_node({"metadata": {"name": name}}, deleted=True))
        self.synced.set()


@dataclass
class _ObjectHandler(_Handler):
    """Caches the supporting objects of one kind."""

    def on_upsert(self, manifest: Manifest) -> None:
        self._enqueue_all(self.cache.applied.set(self.kind, manifest))

    def on_delete(self, manifest: Manifest) -> None:
        self._enqueue_all(self.cache.applied.remove(self.kind, manifest))

    def on_replace(self, uids: set[str], version: int) -> None:
        self._enqueue_all(self.cache.applied.retain(self.kind, uids, version, self.namespace))
        self.synced.set()


class Informers:
    """Fills the cache and keeps it in sync."""

    def __init__(
        self,
        api: ApiClient,
        cache: Cache,
        metrics: Metrics,
        unreadable: UnreadableObjects,
        enqueue: Callable[[Key], None],
        namespaces: Sequence[str] = (),
        watch_nodes: bool = True,
    ) -> None:
        """Watch ``namespaces``, or all, and nodes if ``watch_nodes``.

        Call ``enqueue`` with jobs that changed, or whose pods, nodes or objects did.

        ``unreadable`` gets the objects that cannot be read.
        """
        self._api, self._cache = api, cache
        self._shared = cache, metrics, unreadable, enqueue
        self._namespaces = tuple(namespaces) or ("",)
        self._jobs = [_JobHandler(JOB, *self._shared, n) for n in self._namespaces]
        self._pods = [_PodHandler(POD, *self._shared, n) for n in self._namespaces]
        nodes = _NodeHandler(("v1", "Node"), *self._shared)
        self._nodes = [nodes] if watch_nodes else []
        self._objects: dict[Kind, list[_ObjectHandler]] = {}
        self._tasks = asyncio.TaskGroup()

    async def wait_for_sync(self) -> None:
        """Wait until a namespace is served, and briefly for those whose lists are not refused."""
        patient_until = time.monotonic() + _PATIENCE_SECONDS
        while True:
            reasons = [self.why_unserved(namespace) for namespace in self._namespaces]
            listing = _NOT_CACHED in reasons and time.monotonic() < patient_until
            if not all(reasons) and not listing:
                return
            await asyncio.sleep(_SYNC_POLL_SECONDS)

    def why_unserved(self, namespace: str) -> str:
        """Return why the jobs of ``namespace`` cannot be reconciled; empty if they can be.

        Without its pods in the cache, a job would be taken for one that has lost them. Nodes that may not be
        read count as healthy, but those that can be read must be known.
        """
        support = (
            self._objects.get((version, kind), []) for kind, version in SUPPORT_KINDS.items()
        )
        handlers = chain(self._jobs, self._pods, *support)
        own = [handler for handler in handlers if handler.namespace in ("", namespace)]
        if refusals := [handler.refusal for handler in own if handler.refusal]:
            return refusals[0]
        cached = all(handler.synced.is_set() for handler in own) and all(
            nodes.synced.is_set() or nodes.refusal for nodes in self._nodes
        )
        return "" if cached and len(own) == 2 + len(SUPPORT_KINDS) else _NOT_CACHED

    @property
    def unserved(self) -> tuple[bool, list[str]]:
        """Return whether no namespace is served, and a line about each that is not."""
        reasons = {namespace: self.why_unserved(namespace) for namespace in self._namespaces}
        lines = [
            f"{f'{namespace} is not' if namespace else 'no namespace is'} served: {reason}"
            for namespace, reason in reasons.items()
            if reason
        ]
        return all(reasons.values()), lines

    def active_namespaces(self) -> list[str]:
        """Return the served namespaces with jobs that have not ended."""
        return [n for n in self._cache.active_namespaces() if not self.why_unserved(n)]

    def has_groups(self, version: str) -> bool:
        """Return whether the pod groups of the API ``version`` are cached; the first call watches them."""
        handlers = self._watch_objects((version, POD_GROUP))
        return all(handler.synced.is_set() for handler in handlers)

    async def run(self) -> None:
        """List and watch until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            for nodes in self._nodes:
                self._start(ListWatch(self._api, "/api/v1/nodes", fields=NodeFields), nodes)
            for jobs in self._jobs:
                path = collection(JOB[0], jobs.namespace, JOB[1])
                before = partial(self._cache.before_job_list, jobs.namespace)
                self._start(ListWatch(self._api, path, before_list=before), jobs)
            for pods in self._pods:
                path = collection("v1", pods.namespace, "Pod")
                before = partial(self._cache.before_pod_list, pods.namespace)
                source = ListWatch(self._api, path, SELECTOR, PodFields, before_list=before)
                self._start(source, pods)
            for kind, version in SUPPORT_KINDS.items():
                self._watch_objects((version, kind))

    def _watch_objects(self, kind: Kind) -> list[_ObjectHandler]:
        """Return the handlers of a kind of supporting objects; start their watches at the first call."""
        if kind not in self._objects:
            self._objects[kind] = [self._watch_namespace(kind, n) for n in self._namespaces]
        return self._objects[kind]

    def _watch_namespace(self, kind: Kind, namespace: str) -> _ObjectHandler:
        handler = _ObjectHandler(kind, *self._shared, namespace=namespace)
        path = collection(kind[0], namespace, kind[1])
        metadata_only = kind[0] != Volcano.api_version  # of which the state is read
        before = partial(self._cache.applied.before_list, kind, namespace)
        source = ListWatch(self._api, path, SELECTOR, ObjectFields, metadata_only, before)
        self._start(source, handler, METADATA_RELIST_SECONDS)
        return handler

    def _start(
        self, source: ListWatch, handler: EventHandler, relist_seconds: float = RELIST_SECONDS
    ) -> None:
        self._tasks.create_task(list_and_watch(source, handler, relist_seconds))
