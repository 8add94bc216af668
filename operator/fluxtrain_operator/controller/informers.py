"""Informers: keep the cache of pods, nodes and supporting objects in sync with the API server."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kubernetes.aio.client import ApiClient

from fluxtrain_operator import names
from fluxtrain_operator.controller.api_client import SUPPORT_KINDS, collection
from fluxtrain_operator.controller.cache import Cache, Manifest, SupportObjects
from fluxtrain_operator.controller.list_watch import FAILURES, ListWatch, list_and_watch
from fluxtrain_operator.metrics import Metrics
from fluxtrain_operator.names import Key

LOG = logging.getLogger(__name__)
SELECTOR = f"{names.LABEL_MANAGED_BY}={names.FIELD_MANAGER}"
SUPPORT_SECONDS = 540.0
"""Interval of the lists of supporting objects, which are not watched."""
_RETRY_SECONDS = 5.0


@dataclass
class _Handler:
    """Enqueues the jobs whose cached objects changed."""

    kind: str
    cache: Cache
    metrics: Metrics
    enqueue: Callable[[Key], None]
    synced: asyncio.Event = field(default_factory=asyncio.Event)

    def on_activity(self) -> None:
        self.metrics.record_watch_event(self.kind)

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


class Informers:
    """Fills the cache and keeps it in sync."""

    def __init__(
        self,
        api: ApiClient,
        cache: Cache,
        metrics: Metrics,
        enqueue: Callable[[Key], None],
        namespaces: Sequence[str] = (),
    ) -> None:
        """Watch ``namespaces``, or all; call ``enqueue`` with jobs whose pods, nodes or objects changed."""
        self._api, self._cache, self._enqueue = api, cache, enqueue
        self._namespaces = tuple(namespaces) or ("",)
        self._pods = [
            _PodHandler("pod", cache, metrics, enqueue, namespace=n) for n in self._namespaces
        ]
        self._nodes = _NodeHandler("node", cache, metrics, enqueue)
        self._support_synced = asyncio.Event()

    async def wait_for_sync(self) -> None:
        """Wait until the cache has every object that existed at the start."""
        events = [*(pods.synced for pods in self._pods), self._nodes.synced, self._support_synced]
        await asyncio.gather(*(event.wait() for event in events))

    async def run(self) -> None:
        """List and watch until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._resync_support())
            group.create_task(list_and_watch(ListWatch(self._api, "/api/v1/nodes"), self._nodes))
            for pods in self._pods:
                path = collection("v1", pods.namespace, "Pod")
                group.create_task(list_and_watch(ListWatch(self._api, path, SELECTOR), pods))

    async def _resync_support(self) -> None:
        """List the metadata of all supporting objects at intervals.

        If that fails, each reconcile lists those of its own job.
        """
        while True:
            try:
                support = await self._list_support()
            except FAILURES as error:
                LOG.warning("%s: %s", type(error).__name__, error)
                interval = _RETRY_SECONDS
            else:
                before, self._cache.support = self._cache.support, support
                for key in support.changed_since(before) if before.listed_at > 0 else ():
                    self._enqueue(key)
                interval = SUPPORT_SECONDS
            self._support_synced.set()
            await asyncio.sleep(interval)

    async def _list_support(self) -> SupportObjects:
        support = SupportObjects(listed_at=time.monotonic())
        for namespace in self._namespaces:
            for kind, version in SUPPORT_KINDS.items():
                source = ListWatch(self._api, collection(version, namespace, kind), SELECTOR)
                async for items, _ in source.pages(metadata_only=True):
                    for item in items:
                        support.add(kind, item)
        return support
