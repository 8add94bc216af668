"""Requests to the API server, other than watches and leader election, and to the trainers' /progress."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import aiohttp
from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.exceptions import ApiException

from fluxtrain.contract.model_base import GROUP
from fluxtrain.contract.process import MEMBERS_PATH, PROGRESS_PATH
from fluxtrain.contract.resource.fluxtraining import KIND, PLURAL, VERSION
from fluxtrain.errors import redacted
from fluxtrain_operator.base import names
from fluxtrain_operator.base.errors import ApiError
from fluxtrain_operator.base.job import Job, Manifest
from fluxtrain_operator.base.names import mappings, stamp
from fluxtrain_operator.base.reports import MembersReport, Progress
from fluxtrain_operator.planner.guard import Delete
from fluxtrain_operator.planner.plan import Event

KINDS: dict[str, str] = {
    "ConfigMap": "v1",
    "Service": "v1",
    "Pod": "v1",
    "Secret": "v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PodDisruptionBudget": "policy/v1",
    KIND: f"{GROUP}/{VERSION}",
}
"""API version of each kind in every cluster; those of pod groups depend on the scheduler."""
SUPPORT_KINDS = {
    kind: KINDS[kind] for kind in ("ConfigMap", "Service", "NetworkPolicy", "PodDisruptionBudget")
}
"""Those of a job's supporting objects, which are watched; secrets may not be read."""
_PLURALS = {"NetworkPolicy": "networkpolicies", KIND: PLURAL}
_TIMEOUT_SECONDS = 30.0
_POD_TIMEOUT_SECONDS = 2.0
_MAX_PROGRESS_BYTES = 1 << 16
_MAX_MEMBERS_BYTES = 1 << 20
_MAX_NOTE_LENGTH = 1000


class KubernetesApi:
    """Reads from and writes to one API server."""

    def __init__(
        self,
        api: ApiClient,
        http: aiohttp.ClientSession,
        on_request: Callable[[str, str], None] = lambda method, resource: None,
    ) -> None:
        """Send API requests through ``api``, those for progress through ``http``.

        ``on_request`` is called with the HTTP method and the resource, as in a role, of each API request.
        """
        self._api, self._http, self._on_request = api, http, on_request

    async def create(self, manifest: Manifest) -> Manifest | None:
        """Create an object; return None if one of that name exists."""
        try:
            return await self._request("POST", _path(manifest), manifest)
        except ApiError as error:
            if error.reason == "AlreadyExists":
                return None
            raise

    async def get(self, manifest: Manifest) -> Manifest | None:
        """Return the object with the kind and name of ``manifest``, or None if there is none.

        Sends a list with a field selector: the operator's role allows no ``get``.
        """
        selector = quote(f"metadata.name={manifest['metadata']['name']}")
        objects = await self._request("GET", f"{_path(manifest)}?fieldSelector={selector}")
        return next(iter(objects.get("items", [])), None)

    async def list_unwatched_pods(self, namespace: str) -> list[Manifest]:
        """Return the pods of jobs that no watch finds: they have lost the label of their job."""
        return await self.list_pods(
            namespace,
            f"!{names.LABEL_JOB},{names.LABEL_COMPONENT} in ({names.TRAINER},{names.RENDEZVOUS})",
        )

    async def list_pods(self, namespace: str, selector: str = "") -> list[Manifest]:
        """Return the pods in ``namespace`` with all their fields, which the cache does not keep."""
        path = f"{collection('v1', namespace, 'Pod')}?labelSelector={quote(selector)}"
        return list((await self._request("GET", path)).get("items", []))

    async def apply(self, manifest: Manifest, uid: str) -> Manifest | None:
        """Change the object with ``uid`` by a merge patch: lists are replaced, other missing fields stay.

        Returns None, and changes nothing, if it is gone or another object has its name. Not by server-side
        apply: it would merge the ports of a Service with those that it was created with, which no apply set.
        """
        body = {**manifest, "metadata": {**manifest["metadata"], "uid": uid}}
        name = manifest["metadata"]["name"]
        path = f"{_path(manifest)}/{quote(name)}?fieldManager={names.FIELD_MANAGER}"
        try:
            return await self._request("PATCH", path, body, "application/merge-patch+json")
        except ApiError as error:  # the responses for an object that is gone, and for another uid
            if (
                error.status in (HTTPStatus.CONFLICT, HTTPStatus.NOT_FOUND)
                or "metadata.uid: Invalid" in error.server_message
            ):
                return None
            raise

    async def delete(self, namespace: str, deletion: Delete, version: str) -> Manifest | None:
        """Delete an object; return its last state, or None if it, or the one with that uid, is gone."""
        options: Manifest = {"propagationPolicy": "Background"}
        if deletion.uid:
            options["preconditions"] = {"uid": deletion.uid}
        if deletion.grace_seconds is not None:
            options["gracePeriodSeconds"] = deletion.grace_seconds
        path = f"{collection(version, namespace, deletion.kind)}/{quote(deletion.name)}"
        try:
            return await self._request("DELETE", path, options)
        except ApiError as error:
            if error.status in (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT):
                return None
            raise

    async def write_status(self, manifest: Mapping[str, Any], status: Manifest) -> Manifest:
        """Replace the status of a job, if ``manifest`` is its current version; no spec is sent."""
        metadata = manifest["metadata"]
        jobs = collection(KINDS[KIND], metadata["namespace"], KIND)
        path = f"{jobs}/{quote(metadata['name'])}/status"
        identity = {key: metadata[key] for key in ("name", "namespace", "uid", "resourceVersion")}
        body = {"apiVersion": KINDS[KIND], "kind": KIND, "metadata": identity, "status": status}
        return await self._request("PUT", f"{path}?fieldManager={names.FIELD_MANAGER}", body)

    async def kinds(self, version: str) -> frozenset[str]:
        """Return the kinds that the API server serves in the API ``version``, such as ``apps/v1``."""
        try:
            found = await self._request("GET", f"/apis/{version}")
        except ApiError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return frozenset()
            raise
        return frozenset(str(resource.get("kind")) for resource in mappings(found, "resources"))

    async def create_event(self, job: Job, event: Event, now: float) -> None:
        identity = {"name": job.name, "namespace": job.namespace, "uid": job.uid}
        await self.create_event_about(
            {"apiVersion": KINDS[KIND], "kind": KIND, **identity}, event, now
        )

    async def create_event_about(
        self, regarding: Mapping[str, str], event: Event, now: float
    ) -> None:
        """Create an event about the object that ``regarding`` references; it has a namespace."""
        name, namespace = regarding["name"][:40].rstrip("-."), regarding["namespace"]
        body = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"generateName": f"{name}-", "namespace": namespace},
            "eventTime": stamp(now).replace("Z", ".000000Z"),
            "reportingController": names.MANAGED_BY,
            "reportingInstance": names.FIELD_MANAGER,
            "action": event.reason,
            "reason": event.reason,
            "type": event.type,
            "note": redacted(event.message)[:_MAX_NOTE_LENGTH],
            "regarding": dict(regarding),
        }
        await self._request("POST", collection("events.k8s.io/v1", namespace, "Event"), body)

    async def fetch_progress(self, address: str, port: int) -> Progress | None:
        """Return the progress from the trainer or the rendezvous service at ``address``; None without any.

        The answer of a trainer has a rank, that of the service only a list of them.
        """
        values = await self._fetch_json(address, port, PROGRESS_PATH, _MAX_PROGRESS_BYTES)
        has_rank = isinstance(values, dict) and type(values.get("rank")) is int
        return Progress.from_json(values) if has_rank else Progress.from_agents(values)

    async def fetch_members(self, address: str, port: int) -> MembersReport | None:
        """Return which pods the rendezvous service at ``address`` hears of; None without a valid response."""
        values = await self._fetch_json(address, port, MEMBERS_PATH, _MAX_MEMBERS_BYTES)
        return MembersReport.from_json(values)

    async def _fetch_json(self, address: str, port: int, path: str, max_bytes: int) -> object:
        """Return the JSON at ``path`` of a pod, None if there is none: the pod is starting or stopped."""
        host = f"[{address}]" if ":" in address else address
        timeout = aiohttp.ClientTimeout(total=_POD_TIMEOUT_SECONDS)
        try:
            async with self._http.get(
                f"http://{host}:{port}{path}", timeout=timeout, allow_redirects=False
            ) as response:
                return json.loads(await _read(response.content, max_bytes))
        except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError):
            return None

    async def _request(
        self, method: str, path: str, body: Any = None, content: str = "application/json"
    ) -> Manifest:
        self._on_request(method, resource_of(path))
        headers = {"Accept": "application/json", "Content-Type": content}
        # The body is not passed to param_serialize, which copies it recursively: a third of the CPU time.
        _, url, headers, *_ = await self._api.param_serialize(
            method, path, header_params=headers, auth_settings=["BearerToken"]
        )
        try:
            response = await self._api.call_api(
                method, url, headers, body, _request_timeout=_TIMEOUT_SECONDS
            )
            text = await response.read()
        except (TimeoutError, aiohttp.ClientError, ApiException) as error:
            raise ApiError(0, f"{method} {path}: {error or type(error).__name__}") from error
        values = _json_object(text)
        if response.status >= HTTPStatus.BAD_REQUEST:
            message = str(values.get("message") or response.reason)
            reason = str(values.get("reason") or "")
            raise ApiError(response.status, f"{method} {path}: {message}", reason, message)
        return values


async def _read(content: aiohttp.StreamReader, max_bytes: int) -> bytes:
    """Return all of ``content``; ValueError if it is longer than ``max_bytes``."""
    parts, length = list[bytes](), 0
    async for part in content.iter_any():
        parts.append(part)
        length += len(part)
        if length > max_bytes:
            raise ValueError(f"more than {max_bytes} bytes")
    return b"".join(parts)


def _json_object(text: bytes) -> Manifest:
    """Return the JSON object in ``text``; an empty one for anything else, such as a proxy's page."""
    try:
        values = json.loads(text or b"{}")
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def resource_of(path: str) -> str:
    """Return the resource of a ``path`` in a namespace, such as pods or fluxtrainings/status.

    Empty for a discovery path.
    """
    parts = path.partition("?")[0].strip("/").split("/")
    _, _, plural, _, subresource, *_ = [*parts[2 if parts[0] == "api" else 3 :], *[""] * 5]
    return f"{plural}/{subresource}".rstrip("/")


def _path(manifest: Manifest) -> str:
    return collection(manifest["apiVersion"], manifest["metadata"]["namespace"], manifest["kind"])


def collection(version: str, namespace: str, kind: str) -> str:
    """Return the path of the objects of ``kind`` in ``namespace``, or in all if it is empty."""
    root = "/apis" if "/" in version else "/api"
    plural = _PLURALS.get(kind, f"{kind.lower()}s")
    scope = f"namespaces/{quote(namespace)}/" if namespace else ""
    return f"{root}/{version}/{scope}{plural}"
