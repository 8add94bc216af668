"""Informers: keep the cache of pods, nodes and supporting objects in sync with the API server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from kubernetes.aio.client import ApiClient

from fluxtrain_operator.base import names
from fluxtrain_operator.base.names import Key
from fluxtrain_operator.controller.api_client import SUPPORT_KINDS, collection
from fluxtrain_operator.controller.cache import Cache, Kind, Manifest
from fluxtrain_operator.controller.kept_fields import NodeFields, ObjectFields, PodFields
from fluxtrain_operator.controller.list_watch import (
    RELIST_SECONDS,
    EventHandler,
    ListWatch,
    UnreadableObjects,
    list_and_watch,
)
from fluxtrain_operator.metrics import Metrics
from fluxtrain_operator.resources.scheduling import Volcano

SELECTOR = names.LABEL_JOB
METADATA_RELIST_SECONDS = 3600.0
"""Interval of full lists of supporting objects, even if no watch was lost."""


@dataclass
class _Handler:
    """Enqueues the jobs whose cached objects changed."""

    kind: Kind
    cache: Cache
    metrics: Metrics
    unreadable: UnreadableObjects
    enqueue: Callable[[Key], None]
    synced: asyncio.Event = field(default_factory=asyncio.Event)

    def on_activity(self) -> None:
        self.metrics.record_watch_event(self.kind[1].lower())

    def on_unreadable(self, manifest: Manifest, error: Exception) -> None:
        self.unreadable.report(self.kind, manifest, error)

    def _enqueue_all(self, keys: Iterable[Key | None]) -> None:
        for key in keys:
            if key is not None:
                self.enqueue(key)


@dataclass
class _PodHandler(_Handler):
    """Caches the pods of a namespace, or of all if it is empty."""

    namespace: str = ""

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
    """Caches the supporting objects of one kind in a namespace, or in all if it is empty."""

    namespace: str = ""

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

        Call ``enqueue`` with jobs whose pods, nodes or objects changed.

        ``unreadable`` gets the objects that cannot be read.
        """
        self._api, self._cache = api, cache
        self._shared = cache, metrics, unreadable, enqueue
        self._namespaces = tuple(namespaces) or ("",)
        self._pods = [
            _PodHandler(("v1", "Pod"), *self._shared, namespace=n) for n in self._namespaces
        ]
        nodes = _NodeHandler(("v1", "Node"), *self._shared)
        self._nodes = [nodes] if watch_nodes else []
        self._objects: dict[Kind, list[_ObjectHandler]] = {}
        self._tasks = asyncio.TaskGroup()

    async def wait_for_sync(self) -> None:
        """Wait until the cache has every object that existed at the start; ``run`` must have begun."""
        objects = chain.from_iterable(self._objects.values())
        handlers: list[_Handler] = [*self._pods, *self._nodes, *objects]
        await asyncio.gather(*(handler.synced.wait() for handler in handlers))

    def has_groups(self, version: str, kinds: Iterable[str]) -> bool:
        """Return whether the pod groups of the API ``version`` are cached; the first call watches them."""
        handlers = [self._watch_objects((version, kind)) for kind in kinds]
        return all(handler.synced.is_set() for group in handlers for handler in group)

    async def run(self) -> None:
        """List and watch until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            for nodes in self._nodes:
                self._start(ListWatch(self._api, "/api/v1/nodes", fields=NodeFields), nodes)
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
