"""List and watch of one resource: everything that there is, then every change, for ever."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.exceptions import ApiException

from fluxtrain_operator.errors import ApiError

LOG = logging.getLogger(__name__)
Manifest = Mapping[str, Any]

RELIST_SECONDS = 600.0
"""How often everything is listed anew, though no watch was lost."""
PAGE = 500
"""Objects of one answer: so many are in memory as JSON at a time."""
_ANSWER_SECONDS = 30.0
_SILENCE_SECONDS = 70.0
"""A watch that brings nothing for so long, not even a bookmark, is begun anew from where it was."""
_FIRST_PAUSE_SECONDS = 0.1
_LAST_PAUSE_SECONDS = 10.0
_WHOLE = "application/json"
_METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_FAILURES = (ApiError, ApiException, aiohttp.ClientError, TimeoutError, ValueError)


class ExpiredError(ApiError):
    """The API server does not remember the version from which it was to go on."""


class Feed(Protocol):
    """What is told of the objects of one resource."""

    def there(self, manifest: Manifest) -> None:
        """Take in an object that is there: listed, new or changed."""

    def gone(self, manifest: Manifest) -> None:
        """Take in that an object was deleted."""

    def only(self, uids: set[str], version: int) -> None:
        """Take in that objects of ``uids`` were all that there were at ``version``."""

    def heard(self) -> None:
        """Take in that the watch lives."""


@dataclass(frozen=True)
class Source:
    """The objects at ``path`` that have the labels of ``selector``."""

    api: ApiClient
    path: str
    selector: str = ""

    async def pages(self, *, metadata_only: bool = False) -> AsyncIterator[tuple[list[Any], int]]:
        """Yield the objects, a page at a time, each with the version at which they were all.

        Raises ApiError; ExpiredError where the listing took longer than the API server remembers.
        """
        token = ""
        while True:
            values = await self._page(token, _METADATA_ONLY if metadata_only else _WHOLE)
            metadata = values["metadata"]
            yield values.get("items") or [], int(metadata["resourceVersion"])
            token = metadata.get("continue", "")
            if not token:
                return

    async def events(self, version: str, seconds: float) -> AsyncIterator[tuple[str, Manifest]]:
        """Yield type and object of every change after ``version``, for ``seconds`` at most.

        Raises ApiError; ExpiredError where the API server does not remember ``version``.
        """
        wanted = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version}
        limit = {"timeoutSeconds": max(1, int(seconds))}
        timeout = aiohttp.ClientTimeout(sock_connect=_ANSWER_SECONDS, sock_read=_SILENCE_SECONDS)
        answer = await self._get({**wanted, **limit}, _WHOLE, timeout)
        try:
            async for line in _lines(answer.response.content):
                kind, manifest = _event(line, self.path)
                if kind == "ERROR":
                    raise _error(int(manifest.get("code", 0)), self.path, manifest)
                yield kind, manifest
        finally:
            answer.response.close()

    async def _page(self, token: str, accept: str) -> Any:
        query = {"limit": PAGE, **({"continue": token} if token else {})}
        answer = await self._get(query, accept, aiohttp.ClientTimeout(total=_ANSWER_SECONDS))
        return json.loads(await answer.read())

    async def _get(
        self, query: Mapping[str, Any], accept: str, timeout: aiohttp.ClientTimeout
    ) -> Any:
        chosen = {"labelSelector": self.selector} if self.selector else {}
        path = f"{self.path}?{urlencode({**query, **chosen})}"
        _, url, headers, *_ = await self.api.param_serialize(
            "GET", path, header_params={"Accept": accept}, auth_settings=["BearerToken"]
        )
        answer = await self.api.call_api("GET", url, headers, _request_timeout=timeout)
        if answer.status >= HTTPStatus.BAD_REQUEST:
            text = await answer.read()
            raise _error(answer.status, self.path, text.decode(errors="replace")[:500])
        return answer


async def follow(source: Source, feed: Feed, relist_seconds: float = RELIST_SECONDS) -> None:
    """Keep ``feed`` told of all objects of ``source`` until cancelled; failures only delay it."""
    version, relist_at, pause, complaint = "", 0.0, 0.0, ""
    while True:
        began = time.monotonic()
        try:
            if not version or began >= relist_at:
                version = await _list(source, feed)
                relist_at = began + relist_seconds
            async for kind, manifest in source.events(version, relist_at - time.monotonic()):
                feed.heard()
                version = manifest["metadata"]["resourceVersion"]
                if kind == "DELETED":
                    feed.gone(manifest)
                elif kind != "BOOKMARK":
                    feed.there(manifest)
            complaint = ""
        except ExpiredError:
            version = ""
        except aiohttp.SocketTimeoutError:
            LOG.debug("%s: silent", source.path)
        except _FAILURES as error:
            text = f"{type(error).__name__}: {error}"
            if text != complaint:
                LOG.warning("%s: %s", source.path, text)
            complaint = text
        lasted = time.monotonic() - began
        pause = _FIRST_PAUSE_SECONDS if lasted > pause else min(2 * pause, _LAST_PAUSE_SECONDS)
        await asyncio.sleep(pause)


async def _list(source: Source, feed: Feed) -> str:
    """Tell ``feed`` of all that there is; return the version from which to watch."""
    uids, last = set[str](), 0
    async for items, version in source.pages():
        for item in items:
            uids.add(str(item["metadata"].get("uid", "")))
            feed.there(item)
        last = version
    feed.heard()
    feed.only(uids, last)
    return str(last)


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of ``content``, however long: its own ``readline`` refuses large objects."""
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


def _event(line: bytes, path: str) -> tuple[str, Manifest]:
    """Return type and object of an event; ApiError for what is none, as somebody in between may say."""
    event = json.loads(line)
    if not isinstance(event, dict) or not isinstance(event.get("object"), dict):
        raise ApiError(0, f"{path}: no event: {line[:200]!r}")
    return str(event.get("type")), event["object"]


def _error(status: int, path: str, details: object) -> ApiError:
    kind = ExpiredError if status == HTTPStatus.GONE else ApiError
    return kind(status, f"{path}: {status}: {details}")
