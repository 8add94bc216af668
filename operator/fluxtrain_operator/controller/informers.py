"""Pods, nodes and what is around the pods: listed before anything is decided, then followed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import aiohttp
from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.exceptions import ApiException

from fluxtrain_operator import names
from fluxtrain_operator.controller.api_client import SUPPORT, collection
from fluxtrain_operator.controller.cache import Cache, Manifest, Support
from fluxtrain_operator.controller.list_watch import Source, follow
from fluxtrain_operator.errors import ApiError
from fluxtrain_operator.metrics import Metrics
from fluxtrain_operator.names import Key

LOG = logging.getLogger(__name__)
OURS = f"{names.LABEL_MANAGED_BY}={names.FIELD_MANAGER}"
SUPPORT_SECONDS = 540.0
"""Between two lists of what is around the pods: no watch tells of it."""
_AGAIN_SECONDS = 5.0
_FAILURES = (ApiError, ApiException, aiohttp.ClientError, TimeoutError, ValueError)


@dataclass
class Pods:
    """Tells the store of pods of a namespace, empty for all."""

    store: Cache
    metrics: Metrics
    news: Callable[[Key], None]
    namespace: str = ""
    listed: asyncio.Event = field(default_factory=asyncio.Event)

    def there(self, manifest: Manifest) -> None:
        """Remember a pod."""
        self._tell([self.store.set_pod(manifest)])

    def gone(self, manifest: Manifest) -> None:
        """Forget a pod."""
        self._tell([self.store.set_pod(manifest, gone=True)])

    def only(self, uids: set[str], version: int) -> None:
        """Forget the pods that went while there was no watch."""
        self._tell(self.store.keep_pods(uids, version, self.namespace))
        self.listed.set()

    def heard(self) -> None:
        """Note that the watch lives."""
        self.metrics.heard("pod")

    def _tell(self, keys: Iterable[Key | None]) -> None:
        for key in keys:
            if key is not None:
                self.news(key)


@dataclass
class Nodes:
    """Tells the store of nodes."""

    store: Cache
    metrics: Metrics
    news: Callable[[Key], None]
    listed: asyncio.Event = field(default_factory=asyncio.Event)
    _there: dict[str, str] = field(default_factory=dict)
    """Names by uid."""

    def there(self, manifest: Manifest) -> None:
        """Remember a node."""
        metadata = manifest["metadata"]
        self._there[str(metadata.get("uid", ""))] = str(metadata["name"])
        self._tell(self.store.set_node(manifest))

    def gone(self, manifest: Manifest) -> None:
        """Note that a node is gone."""
        self._there.pop(str(manifest["metadata"].get("uid", "")), None)
        self._tell(self.store.set_node(manifest, gone=True))

    def only(self, uids: set[str], version: int) -> None:
        """Note which nodes went while there was no watch."""
        names_left = {name for uid, name in self._there.items() if uid in uids}
        for uid in self._there.keys() - uids:
            name = self._there.pop(uid)
            if name not in names_left:  # else there is a new one of that name
                self._tell(self.store.set_node({"metadata": {"name": name}}, gone=True))
        self.listed.set()

    def heard(self) -> None:
        """Note that the watch lives."""
        self.metrics.heard("node")

    def _tell(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self.news(key)


class Informers:
    """Fills the store, and keeps it filled."""

    def __init__(
        self,
        api: ApiClient,
        store: Cache,
        metrics: Metrics,
        news: Callable[[Key], None],
        namespaces: Sequence[str] = (),
    ) -> None:
        """Look at ``namespaces``, or at all; tell ``news`` of jobs whose pods or nodes changed."""
        self._api, self._store, self._namespaces = api, store, tuple(namespaces) or ("",)
        self._pods = [Pods(store, metrics, news, name) for name in self._namespaces]
        self._nodes = Nodes(store, metrics, news)
        self._news = news
        self._support_listed = asyncio.Event()

    async def filled(self) -> None:
        """Wait until the store has everything that there was at the start."""
        events = [*(pods.listed for pods in self._pods), self._nodes.listed, self._support_listed]
        await asyncio.gather(*(event.wait() for event in events))

    async def run(self) -> None:
        """List and watch until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._list_support())
            group.create_task(follow(Source(self._api, "/api/v1/nodes"), self._nodes))
            for pods in self._pods:
                path = collection("v1", pods.namespace, "Pod")
                group.create_task(follow(Source(self._api, path, OURS), pods))

    async def _list_support(self) -> None:
        """List the metadata of all that is around pods, again and again.

        Where that fails, each job's is listed when the job has its turn.
        """
        while True:
            try:
                support = await self._support()
            except _FAILURES as error:
                LOG.warning("%s: %s", type(error).__name__, error)
                wait = _AGAIN_SECONDS
            else:
                before, self._store.support = self._store.support, support
                for key in support.differs(before) if before.at > 0 else ():
                    self._news(key)
                wait = SUPPORT_SECONDS
            self._support_listed.set()
            await asyncio.sleep(wait)

    async def _support(self) -> Support:
        found = Support(at=time.monotonic())
        for namespace in self._namespaces:
            for kind, version in SUPPORT.items():
                source = Source(self._api, collection(version, namespace, kind), OURS)
                async for items, _ in source.pages(metadata_only=True):
                    for item in items:
                        found.add(kind, item)
        return found
