"""An API server that only keeps objects: lists in pages, watches, creates, applies; runs no pod.

For what concerns many objects, or what a real one does rarely: versions that are too old, watches that end.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import web

Manifest = dict[str, Any]
TOO_OLD = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}


def _group(name: str, version: str) -> Manifest:
    versions = [{"version": version}]
    return {"name": name, "preferredVersion": versions[0], "versions": versions}


def _resource(kind: str, plural: str, namespaced: bool = True) -> Manifest:
    common = {"name": plural, "singularName": kind.lower(), "kind": kind}
    return {**common, "namespaced": namespaced, "verbs": ["list", "watch", "patch"]}


DISCOVERY: dict[str, Manifest] = {
    "/api": {"versions": ["v1"]},
    "/apis": {
        "groups": [_group("fluxtrain.dev", "v1alpha1"), _group("apiextensions.k8s.io", "v1")]
    },
    "/api/v1": {
        "resources": [_resource("Namespace", "namespaces", False), _resource("Event", "events")]
    },
    "/apis/fluxtrain.dev/v1alpha1": {"resources": [_resource("FluxTraining", "fluxtrainings")]},
    "/apis/apiextensions.k8s.io/v1": {
        "resources": [_resource("CustomResourceDefinition", "customresourcedefinitions", False)]
    },
}
"""What kopf asks before it watches."""


class Request(NamedTuple):
    """One request, when it came."""

    at: float
    method: str
    path: str
    watch: bool
    continued: bool


class Place(NamedTuple):
    """What a path below a group's version is about."""

    plural: str
    namespace: str = ""
    name: str = ""
    subresource: str = ""


@dataclass
class Collection:
    """All objects of one resource, what became of them, and who watches."""

    objects: dict[tuple[str, str], Manifest] = field(default_factory=dict)
    history: list[tuple[int, str, Manifest]] = field(default_factory=list)
    news: set[asyncio.Event] = field(default_factory=set)


class FakeApiServer:
    """Objects by resource, and notes of the requests."""

    def __init__(self) -> None:
        self.collections: dict[str, Collection] = {}
        self.version, self.oldest = 1, 0
        self.requests: list[Request] = []
        self.hidden = ""
        """A resource that nobody can list and watch for now."""
        self.watching: dict[asyncio.Task[Any], str] = {}

    def of(self, plural: str) -> Collection:
        return self.collections.setdefault(plural, Collection())

    def put(self, plural: str, manifest: Manifest) -> Manifest:
        """Create or replace an object."""
        key = _key(manifest)
        collection = self.of(plural)
        kind = "MODIFIED" if key in collection.objects else "ADDED"
        self.version += 1
        metadata = {"uid": f"uid-{self.version}", **manifest["metadata"]}
        metadata["resourceVersion"] = str(self.version)
        made = {**manifest, "metadata": metadata}
        collection.objects[key] = made
        self._tell(collection, kind, made)
        return made

    def remove(self, plural: str, namespace: str, name: str) -> Manifest:
        """Delete an object."""
        collection = self.of(plural)
        gone = collection.objects.pop((namespace, name))
        self.version += 1
        last = {**gone["metadata"], "resourceVersion": str(self.version)}
        self._tell(collection, "DELETED", {**gone, "metadata": last})
        return gone

    def hide(self, plural: str) -> None:
        """End the watches of a resource, and let nobody list and watch it until `show`."""
        self.hidden = plural
        for task, watched in self.watching.items():
            if watched == plural:
                task.cancel()

    def show(self) -> None:
        """Let everybody watch again, but from no version of before."""
        self.hidden, self.oldest = "", self.version

    def _tell(self, collection: Collection, kind: str, manifest: Manifest) -> None:
        collection.history.append((self.version, kind, manifest))
        for event in collection.news:
            event.set()

    # --- what is asked

    async def answer(self, request: web.Request) -> web.StreamResponse:
        watch = request.query.get("watch", "") in ("true", "1")
        continued = "continue" in request.query
        self.requests.append(
            Request(time.monotonic(), request.method, request.path, watch, continued)
        )
        if (found := DISCOVERY.get(request.path)) is not None:
            return web.json_response(found)
        place = _place(request.path)
        if place is None:
            return _refused(404)
        while request.method == "GET" and self.hidden == place.plural:
            await asyncio.sleep(0.02)
        if watch:
            return await self._watch(request, place)
        body = await request.json() if request.can_read_body else {}
        return self._do(request, place, body)

    def _do(self, request: web.Request, place: Place, body: Manifest) -> web.Response:
        objects, key = self.of(place.plural).objects, (place.namespace, place.name)
        if request.method == "GET":
            if not place.name:
                return self._list(request, place)
            return _found(objects.get(key))
        if request.method == "POST":
            body["metadata"].setdefault("namespace", place.namespace)
            body["metadata"].setdefault("name", f"{place.plural}-{self.version}")
            there = _key(body) in objects
            return _refused(409) if there else _found(self.put(place.plural, body))
        if request.method == "DELETE":
            return _found(self.remove(place.plural, *key) if key in objects else None)
        if request.method == "PATCH":
            body["metadata"]["namespace"] = place.namespace
            return _found(self.put(place.plural, body))
        known = objects.get(key)
        if known is None:
            return _refused(404)
        if known["metadata"]["resourceVersion"] != body["metadata"].get("resourceVersion"):
            return _refused(409)
        changed = {**known, **({"status": body["status"]} if place.subresource else body)}
        return _found(self.put(place.plural, changed))

    def _list(self, request: web.Request, place: Place) -> web.Response:
        wanted = request.query.get("labelSelector", "")
        named = request.query.get("fieldSelector", "").removeprefix("metadata.name=")
        found = [
            manifest
            for (namespace, _), manifest in self.of(place.plural).objects.items()
            if place.namespace in ("", namespace)
            and _matches(manifest, wanted)
            and named in ("", manifest["metadata"]["name"])
        ]
        start = int(request.query.get("continue") or 0)
        limit = int(request.query.get("limit") or len(found) or 1)
        page = found[start : start + limit]
        left = len(found) - start - len(page)
        metadata: Manifest = {"resourceVersion": str(self.version)}
        if left > 0:
            metadata |= {"continue": str(start + limit), "remainingItemCount": left}
        partial = "PartialObjectMetadata" in request.headers.get("Accept", "")
        items = [{"metadata": m["metadata"]} for m in page] if partial else page
        return web.json_response({"kind": "List", "metadata": metadata, "items": items})

    async def _watch(self, request: web.Request, place: Place) -> web.StreamResponse:
        version = int(request.query.get("resourceVersion") or 0)
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(request)
        if version < self.oldest:
            await answer.write(_line("ERROR", TOO_OLD))
            return answer
        task = asyncio.current_task()
        assert task is not None
        self.watching[task] = place.plural
        try:
            async for line in self._events(place, version, request.query.get("labelSelector", "")):
                await answer.write(line)
        finally:
            del self.watching[task]
        return answer

    async def _events(self, place: Place, version: int, wanted: str) -> AsyncIterator[bytes]:
        collection, event = self.of(place.plural), asyncio.Event()
        history = collection.history
        start = next((i for i, (v, _, _) in enumerate(history) if v > version), len(history))
        collection.news.add(event)
        try:
            while True:
                event.clear()
                for _, kind, manifest in islice(history, start, None):
                    start += 1
                    here = place.namespace in ("", manifest["metadata"].get("namespace", ""))
                    if here and _matches(manifest, wanted):
                        yield _line(kind, manifest)
                await event.wait()
        finally:
            collection.news.discard(event)


def _line(kind: str, manifest: Manifest) -> bytes:
    return json.dumps({"type": kind, "object": manifest}).encode() + b"\n"


def _found(manifest: Manifest | None) -> web.Response:
    return _refused(404) if manifest is None else web.json_response(manifest)


def _refused(status: int) -> web.Response:
    reason = {404: "NotFound", 409: "AlreadyExists"}[status]
    return web.json_response({"message": "refused", "reason": reason}, status=status)


def _key(manifest: Manifest) -> tuple[str, str]:
    return str(manifest["metadata"].get("namespace", "")), str(manifest["metadata"]["name"])


def _matches(manifest: Manifest, selector: str) -> bool:
    labels = manifest["metadata"].get("labels") or {}
    wanted = (term.partition("=") for term in filter(None, selector.split(",")))
    return all(labels.get(key) == value for key, _, value in wanted)


def _place(path: str) -> Place | None:
    parts = path.strip("/").split("/")
    parts = parts[2 if parts[0] == "api" else 3 :]
    if not parts:
        return None
    if parts[0] == "namespaces" and len(parts) > 2:
        _, namespace, *rest = parts
    else:
        namespace, rest = "", parts
    return Place(rest[0], namespace, *rest[1:3])


@asynccontextmanager
async def serving(server: FakeApiServer, folder: Path) -> AsyncIterator[Path]:
    """Serve on loopback; yield the kubeconfig of who comes."""
    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        path = folder / "kubeconfig"
        path.write_text(json.dumps(_kubeconfig(runner.addresses[0][1])))
        yield path
    finally:
        await runner.cleanup()


def _kubeconfig(port: int) -> Manifest:
    context = {"name": "fake", "context": {"cluster": "fake", "user": "fake"}}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "fake", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "fake", "user": {"token": "unused"}}],
        "contexts": [context],
        "current-context": "fake",
    }
