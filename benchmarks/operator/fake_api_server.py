"""A fake API server in memory: paged lists, watches, writes; it runs no pod.

For very many objects, and for rare events: expired resource versions, watches that end.
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
"""The discovery requests of kopf."""


class Request(NamedTuple):
    """A request and the monotonic time of its arrival."""

    at: float
    method: str
    path: str
    watch: bool
    continued: bool


class ResourcePath(NamedTuple):
    """The parts of a path after its API version."""

    plural: str
    namespace: str = ""
    name: str = ""
    subresource: str = ""


@dataclass
class Collection:
    """The objects of one resource, their events, and the watches to wake."""

    objects: dict[tuple[str, str], Manifest] = field(default_factory=dict)
    history: list[tuple[int, str, Manifest]] = field(default_factory=list)
    watches: set[asyncio.Event] = field(default_factory=set)


class FakeApiServer:
    """Objects by resource, and a record of the requests."""

    def __init__(self) -> None:
        self.collections: dict[str, Collection] = {}
        self.version, self.oldest = 1, 0
        self.requests: list[Request] = []
        self.hidden = ""
        """A resource whose lists and watches wait."""
        self.refused = ""
        """The end of the paths of lists and watches that get 403."""
        self.watching: dict[asyncio.Task[Any], str] = {}

    def of(self, plural: str) -> Collection:
        return self.collections.setdefault(plural, Collection())

    def put(self, plural: str, manifest: Manifest) -> Manifest:
        """Create or replace an object; return it with uid and resource version."""
        key = _key(manifest)
        collection = self.of(plural)
        kind = "MODIFIED" if key in collection.objects else "ADDED"
        self.version += 1
        metadata = {"uid": f"uid-{self.version}", **manifest["metadata"]}
        metadata["resourceVersion"] = str(self.version)
        stored = {**manifest, "metadata": metadata}
        collection.objects[key] = stored
        self._notify(collection, kind, stored)
        return stored

    def remove(self, plural: str, namespace: str, name: str) -> Manifest:
        """Delete an object."""
        collection = self.of(plural)
        removed = collection.objects.pop((namespace, name))
        self.version += 1
        metadata = {**removed["metadata"], "resourceVersion": str(self.version)}
        self._notify(collection, "DELETED", {**removed, "metadata": metadata})
        return removed

    def hide(self, plural: str) -> None:
        """End the watches of a resource; its lists and watches wait until `show`."""
        self.hidden = plural
        self._end_watches(plural)

    def refuse(self, path: str) -> None:
        """End the watches of a resource in all namespaces; refuse them at paths that end with ``path``."""
        self.refused = path
        self._end_watches(path.rpartition("/")[2])

    def _end_watches(self, plural: str) -> None:
        for task, watched in self.watching.items():
            if watched == plural:
                task.cancel()

    def show(self) -> None:
        """Continue lists and watches; the resource versions so far have expired."""
        self.hidden, self.oldest = "", self.version

    def _notify(self, collection: Collection, kind: str, manifest: Manifest) -> None:
        collection.history.append((self.version, kind, manifest))
        for event in collection.watches:
            event.set()

    async def respond(self, request: web.Request) -> web.StreamResponse:
        watch = request.query.get("watch", "") in ("true", "1")
        continued = "continue" in request.query
        self.requests.append(
            Request(time.monotonic(), request.method, request.path, watch, continued)
        )
        if (discovery := DISCOVERY.get(request.path)) is not None:
            return web.json_response(discovery)
        path = _parse_path(request.path)
        if path is None:
            return _error(404)
        if request.method == "GET" and self.refused and request.path.endswith(self.refused):
            return _error(403)
        while request.method == "GET" and self.hidden == path.plural:
            await asyncio.sleep(0.02)
        if watch:
            return await self._watch(request, path)
        body = await request.json() if request.can_read_body else {}
        return self._handle(request, path, body)

    def _handle(self, request: web.Request, path: ResourcePath, body: Manifest) -> web.Response:
        objects, key = self.of(path.plural).objects, (path.namespace, path.name)
        if request.method == "GET":
            if not path.name:
                return self._list(request, path)
            return _response(objects.get(key))
        if request.method == "POST":
            body["metadata"].setdefault("namespace", path.namespace)
            body["metadata"].setdefault("name", f"{path.plural}-{self.version}")
            exists = _key(body) in objects
            return _error(409) if exists else _response(self.put(path.plural, body))
        if request.method == "DELETE":
            return _response(self.remove(path.plural, *key) if key in objects else None)
        if request.method == "PATCH":
            body["metadata"]["namespace"] = path.namespace
            return _response(self.put(path.plural, body))
        stored = objects.get(key)
        if stored is None:
            return _error(404)
        if stored["metadata"]["resourceVersion"] != body["metadata"].get("resourceVersion"):
            return _error(409)
        changed = {**stored, **({"status": body["status"]} if path.subresource else body)}
        return _response(self.put(path.plural, changed))

    def _list(self, request: web.Request, path: ResourcePath) -> web.Response:
        selector = request.query.get("labelSelector", "")
        name = request.query.get("fieldSelector", "").removeprefix("metadata.name=")
        matches = [
            manifest
            for (namespace, _), manifest in self.of(path.plural).objects.items()
            if path.namespace in ("", namespace)
            and _matches(manifest, selector)
            and name in ("", manifest["metadata"]["name"])
        ]
        start = int(request.query.get("continue") or 0)
        limit = int(request.query.get("limit") or len(matches) or 1)
        page = matches[start : start + limit]
        remaining = len(matches) - start - len(page)
        metadata: Manifest = {"resourceVersion": str(self.version)}
        if remaining > 0:
            metadata |= {"continue": str(start + limit), "remainingItemCount": remaining}
        items = [_metadata(m) for m in page] if _is_partial(request) else page
        return web.json_response({"kind": "List", "metadata": metadata, "items": items})

    async def _watch(self, request: web.Request, path: ResourcePath) -> web.StreamResponse:
        version = int(request.query.get("resourceVersion") or 0)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        if version < self.oldest:
            await response.write(_line("ERROR", TOO_OLD))
            return response
        task = asyncio.current_task()
        assert task is not None
        self.watching[task] = path.plural
        try:
            selector, partial = request.query.get("labelSelector", ""), _is_partial(request)
            async for kind, manifest in self._events(path, version, selector):
                await response.write(_line(kind, _metadata(manifest) if partial else manifest))
        finally:
            del self.watching[task]
        return response

    async def _events(
        self, path: ResourcePath, version: int, selector: str
    ) -> AsyncIterator[tuple[str, Manifest]]:
        collection, event = self.of(path.plural), asyncio.Event()
        history = collection.history
        start = next((i for i, (v, _, _) in enumerate(history) if v > version), len(history))
        collection.watches.add(event)
        try:
            while True:
                event.clear()
                for _, kind, manifest in islice(history, start, None):
                    start += 1
                    in_scope = path.namespace in ("", manifest["metadata"].get("namespace", ""))
                    if in_scope and _matches(manifest, selector):
                        yield kind, manifest
                await event.wait()
        finally:
            collection.watches.discard(event)


def _is_partial(request: web.Request) -> bool:
    return "PartialObjectMetadata" in request.headers.get("Accept", "")


def _metadata(manifest: Manifest) -> Manifest:
    return {"metadata": manifest["metadata"]}


def _line(kind: str, manifest: Manifest) -> bytes:
    return json.dumps({"type": kind, "object": manifest}).encode() + b"\n"


def _response(manifest: Manifest | None) -> web.Response:
    return _error(404) if manifest is None else web.json_response(manifest)


def _error(status: int) -> web.Response:
    reason = {403: "Forbidden", 404: "NotFound", 409: "AlreadyExists"}[status]
    return web.json_response({"message": "refused", "reason": reason}, status=status)


def _key(manifest: Manifest) -> tuple[str, str]:
    return str(manifest["metadata"].get("namespace", "")), str(manifest["metadata"]["name"])


def _matches(manifest: Manifest, selector: str) -> bool:
    """Return whether the labels match ``selector``: ``key=value`` or ``key``, separated by commas."""
    labels = manifest["metadata"].get("labels") or {}
    terms = (term.partition("=") for term in selector.split(",") if term)
    return all(key in labels and (not equal or labels[key] == value) for key, equal, value in terms)


def _parse_path(path: str) -> ResourcePath | None:
    parts = path.strip("/").split("/")
    parts = parts[2 if parts[0] == "api" else 3 :]
    if not parts:
        return None
    if parts[0] == "namespaces" and len(parts) > 2:
        _, namespace, *rest = parts
    else:
        namespace, rest = "", parts
    return ResourcePath(rest[0], namespace, *rest[1:3])


@asynccontextmanager
async def serving(server: FakeApiServer, folder: Path) -> AsyncIterator[Path]:
    """Serve on loopback; yield the path of a kubeconfig."""
    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{path:.*}", server.respond)
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
