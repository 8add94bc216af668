"""Requests to the API server, those of watches and of the election left out, and to trainers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import aiohttp
from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.exceptions import ApiException

from fluxtrain.contract.resource.api_model import GROUP
from fluxtrain.contract.resource.fluxtraining import KIND, PLURAL, VERSION
from fluxtrain_operator import names
from fluxtrain_operator.controller.cache import Applied
from fluxtrain_operator.errors import ApiError
from fluxtrain_operator.job import Job, Manifest
from fluxtrain_operator.planner.changes import Delete
from fluxtrain_operator.planner.owners import is_of
from fluxtrain_operator.planner.plan import Event
from fluxtrain_operator.progress import Progress
from fluxtrain_operator.timestamps import stamp

KINDS: dict[str, str] = {
    "ConfigMap": "v1",
    "Service": "v1",
    "Pod": "v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PodDisruptionBudget": "policy/v1",
    KIND: f"{GROUP}/{VERSION}",
}
"""API version of each kind that every cluster has; those of pod groups depend on the scheduler."""
SUPPORT = {
    kind: KINDS[kind] for kind in ("ConfigMap", "Service", "NetworkPolicy", "PodDisruptionBudget")
}
"""Of these, what is around the pods of a job."""
_PLURALS = {"NetworkPolicy": "networkpolicies", KIND: PLURAL}
_TIMEOUT_SECONDS = 30.0
_PROGRESS_SECONDS = 2.0
_MOST_PROGRESS_BYTES = 1 << 16
_LONGEST_NOTE = 1000


class KubernetesApi:
    """Reads and writes of one API server."""

    def __init__(
        self,
        api: ApiClient,
        http: aiohttp.ClientSession,
        asked: Callable[[str, str], None] = lambda method, resource: None,
    ) -> None:
        """Send API requests through ``api`` and ask trainers for their progress through ``http``.

        ``asked`` is told of each API request: the HTTP method, and the resource as roles name it.
        """
        self._api, self._http, self._asked = api, http, asked

    async def create(self, manifest: Manifest) -> Manifest | None:
        """Create an object; return None where one of its name is there already."""
        try:
            return await self._request("POST", _path(manifest), manifest)
        except ApiError as error:
            if error.reason == "AlreadyExists":
                return None
            raise

    async def find(self, manifest: Manifest) -> Manifest | None:
        """Return what has the kind and name of ``manifest``; None where nothing has.

        It is listed, as that is a right which the operator has anyway.
        """
        selector = quote(f"metadata.name={manifest['metadata']['name']}")
        found = await self._request("GET", f"{_path(manifest)}?fieldSelector={selector}")
        return next(iter(found.get("items", [])), None)

    async def apply(self, manifest: Manifest, uid: str) -> Manifest | None:
        """Change the object of that ``uid`` by server-side apply: fields that are not ours are left alone.

        None where it is gone, or another has its name: that one is not touched.
        """
        body = {**manifest, "metadata": {**manifest["metadata"], "uid": uid}}
        name = manifest["metadata"]["name"]
        path = f"{_path(manifest)}/{quote(name)}?fieldManager={names.FIELD_MANAGER}&force=true"
        try:
            return await self._request("PATCH", path, body, "application/apply-patch+yaml")
        except ApiError as error:  # the server's words for one that is gone, and for another one
            if error.status == HTTPStatus.CONFLICT or "metadata.uid: Invalid" in error.said:
                return None
            raise

    async def delete(self, namespace: str, what: Delete, version: str) -> Manifest | None:
        """Delete an object; return it as it is now, None where it, or the one of that uid, is gone."""
        options: Manifest = {"propagationPolicy": "Background"}
        if what.uid:
            options["preconditions"] = {"uid": what.uid}
        if what.grace_seconds is not None:
            options["gracePeriodSeconds"] = what.grace_seconds
        path = f"{collection(version, namespace, what.kind)}/{quote(what.name)}"
        try:
            return await self._request("DELETE", path, options)
        except ApiError as error:
            if error.status in (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT):
                return None
            raise

    async def write_status(self, manifest: Mapping[str, Any], status: Manifest) -> Manifest:
        """Replace the status of a job, only over the version that ``manifest`` is.

        The API server keeps the spec that it has, so none is sent.
        """
        metadata = manifest["metadata"]
        jobs = collection(KINDS[KIND], metadata["namespace"], KIND)
        path = f"{jobs}/{quote(metadata['name'])}/status"
        kept = {key: metadata[key] for key in ("name", "namespace", "uid", "resourceVersion")}
        body = {
            "apiVersion": KINDS[KIND],
            "kind": KIND,
            "metadata": kept,
            "status": status,
        }
        return await self._request("PUT", f"{path}?fieldManager={names.FIELD_MANAGER}", body)

    async def applied(self, job: Job, kinds: Mapping[str, str]) -> dict[tuple[str, str], Applied]:
        """Return the job's own objects of ``kinds`` (kind to API version), by kind and name."""
        found: dict[tuple[str, str], Applied] = {}
        for kind, version in kinds.items():
            for item in (await self._list(job, kind, version)).get("items", []):
                if is_of(item, job.uid):
                    found[kind, item["metadata"]["name"]] = Applied.of(item)
        return found

    async def _list(self, job: Job, kind: str, version: str) -> Manifest:
        selector = quote(f"{names.LABEL_JOB}={job.name}")
        path = f"{collection(version, job.namespace, kind)}?labelSelector={selector}"
        return await self._request("GET", path)

    async def serves(self, version: str) -> bool:
        """Return whether the API server serves the API ``version``."""
        try:
            await self._request("GET", f"/apis/{version}" if "/" in version else f"/api/{version}")
        except ApiError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return False
            raise
        return True

    async def post_event(self, job: Job, event: Event, now: float) -> None:
        """Post an event about ``job``, as ``kubectl describe`` shows it."""
        about = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "name": job.name,
            "namespace": job.namespace,
            "uid": job.uid,
        }
        body = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"generateName": f"{job.name[:40]}-", "namespace": job.namespace},
            "eventTime": stamp(now).replace("Z", ".000000Z"),
            "reportingController": names.MANAGED_BY,
            "reportingInstance": names.FIELD_MANAGER,
            "action": event.reason,
            "reason": event.reason,
            "type": event.type,
            "note": event.message[:_LONGEST_NOTE],
            "regarding": about,
        }
        await self._request("POST", collection("events.k8s.io/v1", job.namespace, "Event"), body)

    async def progress(self, address: str, port: int) -> Progress | None:
        """Return what the trainer at ``address`` says of itself; None where nobody says its rank."""
        host = f"[{address}]" if ":" in address else address
        timeout = aiohttp.ClientTimeout(total=_PROGRESS_SECONDS)
        try:
            url = f"http://{host}:{port}/progress"
            async with self._http.get(url, timeout=timeout, allow_redirects=False) as answer:
                text = await answer.content.read(_MOST_PROGRESS_BYTES)
            values = json.loads(text)
        except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError):
            return None  # not up yet, or no longer: the watchdog judges that, not this
        return (
            Progress.from_json(values)
            if isinstance(values, dict) and type(values.get("rank")) is int
            else None
        )

    async def _request(
        self, method: str, path: str, body: Any = None, content: str = "application/json"
    ) -> Manifest:
        self._asked(method, resource_of(path))
        headers = {"Accept": "application/json", "Content-Type": content}
        # The body goes past param_serialize, which would copy it part by part: a third of the CPU time.
        _, url, headers, *_ = await self._api.param_serialize(
            method, path, header_params=headers, auth_settings=["BearerToken"]
        )
        try:
            answer = await self._api.call_api(
                method, url, headers, body, _request_timeout=_TIMEOUT_SECONDS
            )
            text = await answer.read()
        except (TimeoutError, aiohttp.ClientError, ApiException) as error:
            raise ApiError(0, f"{method} {path}: {error or type(error).__name__}") from error
        values = _read(text)
        if answer.status >= HTTPStatus.BAD_REQUEST:
            said = str(values.get("message") or answer.reason)
            reason = str(values.get("reason") or "")
            raise ApiError(answer.status, f"{method} {path}: {said}", reason, said)
        return values


def _read(text: bytes) -> Manifest:
    """Return the JSON object in ``text``; nothing where a proxy, say, answers with something else."""
    try:
        values = json.loads(text or b"{}")
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def resource_of(path: str) -> str:
    """Return what a ``path`` below a namespace is about, such as pods or fluxtrainings/status.

    Empty where it asks which APIs there are.
    """
    parts = path.partition("?")[0].strip("/").split("/")
    _, _, plural, _, subresource, *_ = [*parts[2 if parts[0] == "api" else 3 :], *[""] * 5]
    return f"{plural}/{subresource}".rstrip("/")


def _path(manifest: Manifest) -> str:
    """Return the path of the collection that ``manifest`` belongs to."""
    return collection(manifest["apiVersion"], manifest["metadata"]["namespace"], manifest["kind"])


def collection(version: str, namespace: str, kind: str) -> str:
    """Return the path of all objects of ``kind`` in ``namespace``, empty for all namespaces."""
    root = "/apis" if "/" in version else "/api"
    plural = _PLURALS.get(kind, f"{kind.lower()}s")
    place = f"namespaces/{quote(namespace)}/" if namespace else ""
    return f"{root}/{version}/{place}{plural}"
