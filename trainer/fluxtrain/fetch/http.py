"""HTTP downloads that resume at a byte offset: time limits, few redirects, never from https to http.

Why no HTTP library: docs/decisions/0009. A path on a file system can be read in place of a URL, so that a
mounted volume works like a server.
"""

from __future__ import annotations

import http.client
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar
from urllib.parse import quote, urlsplit

from fluxtrain.errors import FluxtrainError, redacted

MAX_SMALL_BYTES = 1 << 26
_BLOCK_BYTES = 1 << 20
_KEPT = "%/:=&?~#+!$,;'@()*[]"
"""Characters that a URL has as they are, beside letters and digits."""
_MAX_REDIRECTS = 5
_PERMANENT = range(400, 500)
_RETRYABLE = (408, 425, 429)
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
Result = TypeVar("Result")


class DownloadError(FluxtrainError):
    """A file could not be downloaded completely; the same command resumes."""


class RetryableError(Exception):
    """One attempt failed; another may succeed."""


class ExhaustedError(Exception):
    """All attempts have failed; the message is of the last."""


class CannotResumeError(RetryableError):
    """The server cannot send the rest of a partial file; the download must start over."""


class SupportsRead1(Protocol):
    """A response or a file."""

    def read1(self, size: int, /) -> bytes:
        """Return at most ``size`` bytes; none at the end."""
        ...


@dataclass(frozen=True)
class ByteStream:
    """A response's bytes from ``start`` on; ``total`` is the size of the whole file if it is known."""

    source: SupportsRead1
    start: int
    total: int | None
    version: str = ""
    """ETag, or time of modification, of the file; "" if the server tells neither."""

    def blocks(self, timeout: float, min_rate: float) -> Iterator[bytes]:
        """Yield blocks; RetryableError if fewer than ``min_rate`` bytes/s arrive over ``timeout`` seconds.

        A socket's own timeout restarts with every byte, so it does not end a very slow response.
        """
        begin, received = time.monotonic(), 0
        while block := self._read_block():
            yield block
            received += len(block)
            if time.monotonic() - begin > timeout:
                if received < min_rate * timeout:
                    raise RetryableError(f"only {received} bytes in {timeout:g} s")
                begin, received = time.monotonic(), 0

    def require_total(self, received: int) -> None:
        """Raise RetryableError if ``received`` bytes are not the whole file."""
        if self.total is not None and received != self.total:
            raise RetryableError(f"truncated: {received} of {self.total} bytes")

    def _read_block(self) -> bytes:
        try:
            return self.source.read1(_BLOCK_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise RetryableError(_message(error)) from None


def _nothing() -> None:
    """Do nothing; unlike a lambda it can be given to another process."""


@dataclass(frozen=True)
class RetryPolicy:
    """How long a store is tried; times in seconds."""

    attempts: int = 5
    backoff: float = 1.0
    """Seconds before the second attempt; doubled before each later one."""
    timeout: float = 60.0
    min_rate: float = 1024.0
    """Bytes per second over ``timeout`` seconds, below which an attempt is given up."""
    check: Callable[[], object] = _nothing
    """Called at each block and while waiting; what it raises ends the fetch."""

    def wait(self, attempt: int) -> None:
        """Wait after the failed attempt number ``attempt``, counted from 1."""
        end = time.monotonic() + min(60.0, self.backoff * 2 ** (attempt - 1))
        while (left := end - time.monotonic()) > 0:
            self.check()
            time.sleep(min(0.2, left))

    def tried(self, action: Callable[[], Result]) -> Result:
        """Return what ``action`` does, tried again after a RetryableError; ExhaustedError in the end."""
        for attempt in range(1, self.attempts + 1):
            try:
                return action()
            except RetryableError as error:
                message = str(error)
            if attempt < self.attempts:
                self.wait(attempt)
        raise ExhaustedError(f"{message}; tried {self.attempts} times")


@dataclass(frozen=True)
class HttpClient(RetryPolicy):
    """Opens URLs, and tries small files again by its own policy."""

    def read_small(self, url: str) -> bytes:
        """Return the content of ``url``, at most 64 MiB; DownloadError if it cannot be downloaded."""
        try:
            return self.tried(lambda: self._read_once(url))
        except ExhaustedError as error:
            raise DownloadError(f"{redacted(url)}: {error}") from None

    def _read_once(self, url: str) -> bytes:
        with self.open(url, 0) as stream:
            content = b""
            for block in stream.blocks(self.timeout, self.min_rate):
                content += block
                if len(content) > MAX_SMALL_BYTES:
                    raise RetryableError(f"more than {MAX_SMALL_BYTES} bytes")
            stream.require_total(len(content))
            return content

    @contextmanager
    def open(self, url: str, offset: int, version: str = "") -> Iterator[ByteStream]:
        """Yield the bytes of ``url`` from ``offset`` on, or from 0 if the server ignores the range.

        If the file is not of ``version`` any more, the server sends it from 0 on.

        Raises DownloadError if a retry cannot help, RetryableError if it can.
        """
        if not is_url(url):
            with _open_file(url) as file:
                size = os.fstat(file.fileno()).st_size
                yield ByteStream(file, file.seek(offset if offset <= size else 0), size)
            return
        with _request(url, offset, self.timeout, version) as response:
            yield _byte_stream(response, offset)


def is_url(text: str) -> bool:
    parts = urlsplit(text) if text.startswith(("http://", "https://")) else None
    return parts is not None and bool(parts.hostname)


class _RedirectHandler(urllib.request.HTTPRedirectHandler):
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
        """Follow redirects to http and https only, and never from https to http."""
        if not is_url(newurl) or (req.type == "https" and not newurl.startswith("https:")):
            fp.close()
            raise DownloadError(
                redacted(f"{req.full_url}: redirects to {newurl[:200]!r}, which is not followed")
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _request(url: str, offset: int, timeout: float, version: str = "") -> http.client.HTTPResponse:
    url = quote(url, safe=_KEPT)  # spaces and letters beyond ASCII, as browsers do
    headers = {"Accept-Encoding": "identity", "User-Agent": "fluxtrain"}
    if offset:
        headers["Range"] = f"bytes={offset}-"
    if offset and version and not version.startswith("W/"):  # a weak one cannot be asked for
        headers["If-Range"] = version
    opener = urllib.request.build_opener(_RedirectHandler)
    try:
        response = opener.open(urllib.request.Request(url, headers=headers), timeout=timeout)
    except urllib.error.HTTPError as error:
        with error:
            raise _status_error(url, error.code, " ".join(str(error.reason).split())) from None
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: a malformed URL
        raise RetryableError(_message(error)) from None
    assert isinstance(response, http.client.HTTPResponse)
    return response


def _status_error(url: str, code: int, reason: str) -> Exception:
    if code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
        return CannotResumeError("the file is shorter than the partial download")
    if code in _PERMANENT and code not in _RETRYABLE:
        return DownloadError(f"{redacted(url)}: {code} {reason[:100]}")
    return RetryableError(f"{code} {reason[:100]}")


def _message(error: Exception) -> str:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    text = redacted(str(cause))[:200]
    return text if text and text.isprintable() else type(cause).__name__


def _byte_stream(response: http.client.HTTPResponse, offset: int) -> ByteStream:
    length = response.headers.get("Content-Length", "")
    size = int(length) if length.isascii() and length.isdigit() and len(length) < 20 else None
    version = response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
    if response.status == http.HTTPStatus.OK:
        return ByteStream(response, 0, size, version)
    if response.status != http.HTTPStatus.PARTIAL_CONTENT:
        raise RetryableError(f"unexpected status {response.status}")
    content_range = response.headers.get("Content-Range")
    match = _CONTENT_RANGE.fullmatch((content_range or "")[:100])
    if not match or int(match[1]) != offset:
        raise CannotResumeError(f"requested byte {offset} on, got {content_range!r}")
    return ByteStream(response, offset, int(match[2]) + 1, version)


def _open_file(path: str) -> Any:
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise DownloadError(f"{path}: {error.strerror}") from None
