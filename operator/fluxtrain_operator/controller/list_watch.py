"""List and watch of one resource, in the manner of client-go's reflector."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import urlencode

import aiohttp
import msgspec
from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.exceptions import ApiException

from fluxtrain_operator.base.errors import ApiError
from fluxtrain_operator.base.names import mapping
from fluxtrain_operator.controller.cache import Kind
from fluxtrain_operator.controller.work_queue import Pace
from fluxtrain_operator.metrics import Metrics
from fluxtrain_operator.planner.plan import Event

LOG = logging.getLogger(__name__)
Manifest = Mapping[str, Any]

RELIST_SECONDS = 600.0
"""Interval of full lists, even if no watch was lost."""
_WATCH_SECONDS = 600.0
"""A watch ends after so long and continues from its last version."""
PAGE = 500
"""Objects per page of a list: as many are decoded in memory at a time."""
FAILURES = (ApiError, ApiException, aiohttp.ClientError, TimeoutError, ValueError)
"""Errors of a list or watch that are retried."""
_LIST_TIMEOUT_SECONDS = 30.0
_IDLE_TIMEOUT_SECONDS = 70.0
"""After so long without any event, not even a bookmark, all objects are listed again."""
_TOO_LARGE = "Too large resource version"  # etcd has not reached it, or no longer has it
_FIRST_BACKOFF_SECONDS = 0.1
_MAX_BACKOFF_SECONDS = 10.0


class ExpiredError(ApiError):
    """The API server no longer has the resource version from which to continue."""


class EventHandler(Protocol):
    """Receives the objects of one resource."""

    def on_upsert(self, manifest: Manifest) -> None:
        """Handle a listed, new or changed object."""

    def on_delete(self, manifest: Manifest) -> None:
        """Handle a deleted object."""

    def on_replace(self, uids: set[str], version: int) -> None:
        """Handle the end of a list: ``uids`` are all objects that existed at ``version``."""

    def on_unreadable(self, manifest: Manifest, error: Exception) -> None:
        """Handle an object that the handler failed on: it is skipped."""

    def on_activity(self) -> None:
        """Handle the sign of a working watch: an event, a bookmark or the end of a list."""

    def on_failure(self, error: Exception) -> None:
        """Handle the failure of a list or watch, which is retried."""


class _ListMetadata(msgspec.Struct):
    version: str = msgspec.field(name="resourceVersion")
    token: str = msgspec.field(name="continue", default="")


class _Page(msgspec.Struct):
    metadata: _ListMetadata
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


@dataclass(frozen=True)
class ListWatch:
    """The list and watch requests for the objects at ``path`` that match ``selector``."""

    api: ApiClient
    path: str
    selector: str = ""
    fields: Any = dict[str, Any]
    """The type of the objects: a TypedDict, if other fields need not be decoded."""
    metadata_only: bool = False
    """Whether the API server leaves out everything but kind and metadata."""
    before_list: Callable[[], Callable[[int], None]] | None = None
    """Called before each list; what it returns gets the version of the list before any of its objects."""

    async def pages(self) -> AsyncIterator[tuple[list[Manifest], int]]:
        """Yield the objects of each page with the resource version of the list.

        Raises ApiError; ExpiredError if the API server has dropped that version meanwhile.
        """
        token = ""
        while True:
            page = await self._page(token)
            yield [self._object(item) for item in page.items or ()], int(page.metadata.version)
            token = page.metadata.token
            if not token:
                return

    async def watch(self, version: str, seconds: float) -> AsyncIterator[tuple[str, Manifest]]:
        """Yield type and object of every event after ``version``, for ``seconds`` at most.

        Raises ApiError; ExpiredError if the API server no longer has ``version``.
        """
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": max(1, int(seconds)),
        }
        timeout = aiohttp.ClientTimeout(
            sock_connect=_LIST_TIMEOUT_SECONDS, sock_read=_IDLE_TIMEOUT_SECONDS
        )
        response = await self._get(query, self._accept(""), timeout)
        try:
            async for line in _lines(response.response.content):
                event = _event(line, self.path)
                if event.type == "ERROR":
                    status = json.loads(bytes(event.object))
                    raise _error(int(status.get("code", 0)), self.path, status)
                yield event.type, self._object(event.object)
        finally:
            response.response.close()

    def _object(self, text: msgspec.Raw) -> Manifest:
        """Return the object in ``text``: all of it if its fields do not have their types."""
        try:
            manifest = _decoder(self.fields).decode(text)
        except msgspec.DecodeError:
            manifest = json.loads(bytes(text))
        if not isinstance(manifest, dict):
            raise ApiError(0, f"{self.path}: not an object: {bytes(text)[:200]!r}")
        return manifest

    async def _page(self, token: str) -> _Page:
        query = {"limit": PAGE, **({"continue": token} if token else {})}
        timeout = aiohttp.ClientTimeout(total=_LIST_TIMEOUT_SECONDS)
        response = await self._get(query, self._accept("List"), timeout)
        return msgspec.json.decode(await response.read(), type=_Page)

    def _accept(self, suffix: str) -> str:
        metadata = f";as=PartialObjectMetadata{suffix};g=meta.k8s.io;v=v1"
        return f"application/json{metadata if self.metadata_only else ''}"

    async def _get(
        self, query: Mapping[str, Any], accept: str, timeout: aiohttp.ClientTimeout
    ) -> Any:
        selector = {"labelSelector": self.selector} if self.selector else {}
        path = f"{self.path}?{urlencode({**query, **selector})}"
        _, url, headers, *_ = await self.api.param_serialize(
            "GET", path, header_params={"Accept": accept}, auth_settings=["BearerToken"]
        )
        response = await self.api.call_api("GET", url, headers, _request_timeout=timeout)
        if response.status >= HTTPStatus.BAD_REQUEST:
            text = await response.read()
            raise _error(response.status, self.path, text.decode(errors="replace")[:500])
        return response


async def list_and_watch(
    source: ListWatch, handler: EventHandler, relist_seconds: float = RELIST_SECONDS
) -> None:
    """Pass all objects of ``source`` and their changes to ``handler`` until cancelled; retry failures."""
    version, relist_at, backoff, last_warning = "", 0.0, 0.0, ""
    while True:
        started = time.monotonic()
        try:
            if not version or started >= relist_at:
                version = await _list(source, handler)
                relist_at = started + relist_seconds
            seconds = min(_WATCH_SECONDS, relist_at - time.monotonic())
            async for event_type, manifest in source.watch(version, seconds):
                handler.on_activity()
                version = _next_version(version, manifest["metadata"]["resourceVersion"], source)
                if event_type == "DELETED":
                    _pass(manifest, handler.on_delete, handler)
                elif event_type != "BOOKMARK":
                    _pass(manifest, handler.on_upsert, handler)
            last_warning = ""
        except ExpiredError:
            version = ""
        except aiohttp.SocketTimeoutError:
            version = ""  # or etcd was rolled back: a watch of a version that it lacks is silent
            LOG.debug("%s: no event, listed again", source.path)
        except FAILURES as error:
            last_warning = _warn_once(source, error, last_warning)
            handler.on_failure(error)
            version = "" if is_refused(error) else version  # what happens meanwhile is not seen
        lasted = time.monotonic() - started
        slower = min(2 * backoff, _MAX_BACKOFF_SECONDS)
        backoff = _FIRST_BACKOFF_SECONDS if lasted > backoff else slower
        await asyncio.sleep(backoff)


def _warn_once(source: ListWatch, error: Exception, last_warning: str) -> str:
    """Log ``error``, unless ``last_warning`` was the same; return the warning."""
    warning = f"{type(error).__name__}: {error}"
    if warning != last_warning:
        LOG.warning("%s: %s", source.path, warning)
    return warning


def is_refused(error: Exception) -> bool:
    """Return whether the API server refuses a list or watch: no right to it, or no such resource."""
    refusals = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND)
    return isinstance(error, ApiError) and error.status in refusals


async def _list(source: ListWatch, handler: EventHandler) -> str:
    """Pass all objects to ``handler``; return the resource version from which to watch."""
    uids, last = set[str](), 0
    on_version = source.before_list() if source.before_list is not None else None
    async for items, version in source.pages():
        if on_version is not None and last == 0:
            on_version(version)
        for item in items:
            uids.add(str(item["metadata"].get("uid", "")))
            _pass(item, handler.on_upsert, handler)
        last = version
    handler.on_activity()
    handler.on_replace(uids, last)
    return str(last)


def _next_version(before: str, version: str, source: ListWatch) -> str:
    """Return ``version``; raise ExpiredError if it is less than that ``before``: etcd was rolled back."""
    if before.isdecimal() and version.isdecimal() and int(version) < int(before):
        raise ExpiredError(0, f"{source.path}: version {version} after {before}")
    return version


def _pass(manifest: Manifest, handle: Callable[[Manifest], None], handler: EventHandler) -> None:
    """Pass one object to ``handle``; any error of one object must not end the watch of all others."""
    try:
        handle(manifest)
    except Exception as error:
        handler.on_unreadable(manifest, error)


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of ``content`` of any length: aiohttp's ``readline`` limits them."""
    parts: list[bytes] = []
    async for chunk in content.iter_any():
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            yield b"".join((*parts, end))
            parts.clear()
        if rest:
            parts.append(rest)
    if parts:
        yield b"".join(parts)


def _event(line: bytes, path: str) -> _Event:
    """Return a watch event; raise ApiError for anything else, such as a proxy's text."""
    try:
        return msgspec.json.decode(line, type=_Event)
    except msgspec.DecodeError:
        raise ApiError(0, f"{path}: not a watch event: {line[:200]!r}") from None


@cache
def _decoder(of: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(of)


def _error(status: int, path: str, details: object) -> ApiError:
    is_ahead = status == HTTPStatus.GATEWAY_TIMEOUT and _TOO_LARGE in str(details)
    error = ExpiredError if status == HTTPStatus.GONE or is_ahead else ApiError
    return error(status, f"{path}: {status}: {details}")


# Objects that cannot be read: they are skipped, counted and logged, and an event informs their owner.
#
# An object gets one event per generation from each leader, and Kubernetes drops events after an
# hour. Objects without a namespace, such as nodes, get none: the operator may create events in
# watched namespaces only.


Reference = Mapping[str, str]
"""``apiVersion``, ``kind``, ``name``, ``namespace`` and ``uid`` of an object."""
CreateEvent = Callable[[Reference, Event], Awaitable[None]]
REASON = "Unreadable"
MAX_KNOWN = 1000
"""Objects that are remembered; of more, the oldest are reported again when they are read again."""
_EVENTS_PER_SECOND = 5.0
_MAX_LENGTH = 500
_MAX_NAME = 253


class UnreadableObjects:
    """Reports objects that the operator skips."""

    def __init__(self, metrics: Metrics) -> None:
        """Count them in ``metrics``; events wait until `post_events` runs."""
        self._metrics = metrics
        self._known: dict[str, object] = {}  # generations by uid
        self._waiting: dict[str, tuple[Reference, Event]] = {}  # by uid
        self._wake = asyncio.Event()

    def report(self, kind: Kind, manifest: Mapping[str, Any], error: Exception) -> None:
        """Report the object in ``manifest``, of which anything may be malformed."""
        label = kind[1].lower()
        self._metrics.unreadable_objects.labels(label).inc()
        metadata = mapping(manifest, "metadata")
        identity = {key: _text(metadata.get(key)) for key in ("name", "namespace", "uid")}
        reference = {"apiVersion": kind[0], "kind": kind[1], **identity}
        name = f"{reference['namespace']}/{reference['name']}"
        text = f"{type(error).__name__}: {str(error)[:_MAX_LENGTH]}"
        LOG.error("%s %s is skipped: %s", label, name, text)
        generation = mapping(manifest, "metadata").get("generation")
        uid, is_known = reference["uid"], self._known.get(reference["uid"], self) == generation
        if not uid or not reference["namespace"] or is_known:
            return
        self._known.pop(uid, None)
        self._known[uid] = generation
        self._waiting[uid] = reference, Event("Warning", REASON, f"ignored by the operator: {text}")
        while len(self._known) > MAX_KNOWN:
            oldest = next(iter(self._known))
            del self._known[oldest]
            self._waiting.pop(oldest, None)
        self._wake.set()

    async def post_events(self, create_event: CreateEvent) -> None:
        """Create the events by ``create_event`` until cancelled; only the leader calls this."""
        pace = Pace(_EVENTS_PER_SECOND)
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                await pace.wait()
                reference, event = self._waiting.pop(next(iter(self._waiting)))
                try:
                    await create_event(reference, event)
                except ApiError as error:  # such as a namespace that is being deleted
                    self._known.pop(reference["uid"], None)
                    LOG.warning("no event about %s: %s", reference["name"], error)


def _text(value: object) -> str:
    return value[:_MAX_NAME] if isinstance(value, str) else ""
