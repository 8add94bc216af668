"""Reading over HTTP from a given byte on: time limits, few redirects, never from https to http.

A folder can stand for a server: a mounted volume is read in the same way.
"""

from __future__ import annotations

import http.client
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import IO, Any, Protocol
from urllib.parse import urlsplit

from fluxtrain.errors import FluxtrainError

_BLOCK = 1 << 20
_MAX_REDIRECTS = 5
_MAX_SMALL = 1 << 26
_PERMANENT = range(400, 500)
_TRY_AGAIN = (408, 425, 429)
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


class DownloadError(FluxtrainError):
    """A file could not be had, or not whole; the same command goes on where it stopped."""


class RetryableError(Exception):
    """One attempt failed; another may do better."""


class CannotResumeError(RetryableError):
    """The server cannot send the rest of what is here; from the start it may."""


class Readable(Protocol):
    """What a transfer needs of a response or a file."""

    def read1(self, size: int, /) -> bytes:
        """Return what is there, at most ``size`` bytes; nothing at the end."""
        ...


@dataclass(frozen=True)
class ByteStream:
    """An open source: its bytes from ``start`` on; ``total`` is its whole size where it says so."""

    reader: Readable
    start: int
    total: int | None

    def blocks(self, timeout: float, min_rate: float) -> Iterator[bytes]:
        """Yield blocks; RetryableError where fewer than ``min_rate`` bytes/s come over ``timeout`` seconds.

        A socket's own time limit is renewed by every byte, so a slow drip would never end.
        """
        begin, received = time.monotonic(), 0
        while block := self._block():
            yield block
            received += len(block)
            if time.monotonic() - begin > timeout:
                if received < min_rate * timeout:
                    raise RetryableError(f"only {received} bytes in {timeout:g} s")
                begin, received = time.monotonic(), 0

    def _block(self) -> bytes:
        try:
            return self.reader.read1(_BLOCK)
        except (OSError, http.client.HTTPException) as error:
            raise RetryableError(_reason(error)) from None


@dataclass(frozen=True)
class HttpClient:
    """How to reach servers: seconds without an answer, and how often to try."""

    timeout: float = 60.0
    attempts: int = 5
    backoff: float = 1.0
    """Seconds before the second attempt; doubled before each later one."""
    min_rate: float = 1024.0

    def pause(self, attempt: int) -> None:
        """Wait before attempt ``attempt``, counted from 1."""
        time.sleep(min(60.0, self.backoff * 2 ** (attempt - 1)))

    def read_small(self, url: str) -> bytes:
        """Return the content of ``url``, at most 64 MiB; DownloadError where it cannot be had."""
        why = ""
        for attempt in range(1, self.attempts + 1):
            try:
                with self.open(url, 0) as transfer:
                    return _bounded(transfer, self)
            except RetryableError as error:
                why = str(error)
            if attempt < self.attempts:
                self.pause(attempt)
        raise DownloadError(f"{url}: {why}; tried {self.attempts} times")

    @contextmanager
    def open(self, url: str, offset: int) -> Iterator[ByteStream]:
        """Yield what comes of ``url`` from byte ``offset``, or from its start if the server wills it.

        Raises DownloadError where asking again cannot help, RetryableError where it can.
        """
        if not is_url(url):
            with _open_file(url) as file:
                size = os.fstat(file.fileno()).st_size
                yield ByteStream(file, file.seek(offset if offset <= size else 0), size)
            return
        with _request(url, offset, self.timeout) as response:
            yield _transfer(response, offset)


def is_url(text: str) -> bool:
    """Return whether ``text`` is an http or https URL."""
    parts = urlsplit(text) if text.startswith(("http://", "https://")) else None
    return parts is not None and bool(parts.hostname)


class _Redirects(urllib.request.HTTPRedirectHandler):
    max_redirections = _MAX_REDIRECTS

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Any,
        newurl: str,
    ) -> urllib.request.Request | None:
        """Follow to http or https only, and never from https to http."""
        if not is_url(newurl) or (req.type == "https" and not newurl.startswith("https:")):
            fp.close()
            raise DownloadError(
                f"{req.full_url}: it sends to {newurl[:200]!r}, which is not followed"
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _request(url: str, offset: int, timeout: float) -> http.client.HTTPResponse:
    headers = {"Accept-Encoding": "identity", "User-Agent": "fluxtrain"}
    if offset:
        headers["Range"] = f"bytes={offset}-"
    opener = urllib.request.build_opener(_Redirects)
    try:
        response = opener.open(urllib.request.Request(url, headers=headers), timeout=timeout)
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(url, error.code, str(error.reason)) from None
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: a malformed URL
        raise RetryableError(_reason(error)) from None
    assert isinstance(response, http.client.HTTPResponse)
    return response


def _refusal(url: str, code: int, reason: str) -> Exception:
    if code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
        return CannotResumeError("it has fewer bytes than are here already")
    if code in _PERMANENT and code not in _TRY_AGAIN:
        return DownloadError(f"{url}: {code} {reason[:100]}")
    return RetryableError(f"{code} {reason[:100]}")


def _reason(error: Exception) -> str:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    text = str(cause)[:200]
    return text if text and text.isprintable() else type(cause).__name__


def _transfer(response: http.client.HTTPResponse, offset: int) -> ByteStream:
    headers: Message = response.headers
    length = headers.get("Content-Length", "")
    size = int(length) if length.isascii() and length.isdigit() and len(length) < 20 else None
    if response.status == http.HTTPStatus.OK:
        return ByteStream(response, 0, size)
    if response.status != http.HTTPStatus.PARTIAL_CONTENT:
        raise RetryableError(f"answered {response.status}")
    found = _RANGE.fullmatch(headers.get("Content-Range", "")[:100])
    if not found or int(found[1]) != offset:
        raise CannotResumeError(
            f"asked for byte {offset} on, it sends {headers.get('Content-Range')!r}"
        )
    return ByteStream(response, offset, int(found[2]) + 1)


def _open_file(path: str) -> Any:
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise DownloadError(f"{path}: {error.strerror}") from None


def _bounded(transfer: ByteStream, link: HttpClient) -> bytes:
    content = b""
    for block in transfer.blocks(link.timeout, link.min_rate):
        content += block
        if len(content) > _MAX_SMALL:
            raise RetryableError(f"more than {_MAX_SMALL} bytes")
    if transfer.total is not None and len(content) != transfer.total:
        raise RetryableError(f"cut off: {len(content)} of {transfer.total} bytes")
    return content
