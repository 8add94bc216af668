"""A local HTTP server whose responses can stall, be truncated, redirect or be wrong, path by path."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Respond = Callable[["Handler", bytes], None]


class Server(ThreadingHTTPServer):
    """Serves ``files``; ``responses`` of a path are used in turn, and the last one for ever."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {f"/{name}": content for name, content in files.items()}
        self.responses: dict[str, list[Respond]] = {}
        self.num_requests = Counter[str]()
        self.ranges: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing when a client disconnects."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.num_requests[path] += 1
        self.server.ranges.append(self.headers.get("Range"))
        if path not in self.server.files:
            self.send_error(404)
            return
        responses = self.server.responses.get(path, [correct])
        respond = responses.pop(0) if len(responses) > 1 else responses[0]
        respond(self, self.server.files[path])

    do_HEAD = do_GET  # noqa: N815  (the library's name)

    def start(self, code: int, length: int | None, **headers: str) -> None:
        self.send_response(code)
        if length is not None:
            self.send_header("Content-Length", str(length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def start_from_offset(self, content: bytes, **headers: str) -> bytes:
        """Send the headers of the requested range; return its bytes."""
        offset = self.offset()
        if offset:
            headers["Content_Range"] = f"bytes {offset}-{len(content) - 1}/{len(content)}"
        self.start(206 if offset else 200, len(content) - offset, **headers)
        return content[offset:]

    def offset(self) -> int:
        return int((self.headers.get("Range") or "bytes=0-")[6:-1])

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing."""


def correct(handler: Handler, content: bytes) -> None:
    if handler.offset() and handler.offset() >= len(content):
        handler.start(416, 0)
    else:
        handler.wfile.write(handler.start_from_offset(content))


def without_ranges(handler: Handler, content: bytes) -> None:
    handler.start(200, len(content))
    handler.wfile.write(content)


def truncated(handler: Handler, content: bytes) -> None:
    handler.start(200, len(content))
    handler.wfile.write(content[: len(content) // 2])


def truncated_without_length(handler: Handler, content: bytes) -> None:
    handler.start(200, None)
    handler.wfile.write(content[: len(content) // 2])


def stalled(handler: Handler, content: bytes) -> None:
    handler.start(200, len(content))
    handler.wfile.write(content[:1000])
    handler.wfile.flush()
    time.sleep(1.5)


def no_response(handler: Handler, content: bytes) -> None:
    time.sleep(1.5)


def trickling(handler: Handler, content: bytes) -> None:
    """Send a byte every 0.05 s, so that no single read times out."""
    handler.start(200, len(content))
    for byte in content[:40]:
        handler.wfile.write(bytes([byte]))
        handler.wfile.flush()
        time.sleep(0.05)


def closed_connection(handler: Handler, content: bytes) -> None:
    handler.connection.close()


def unavailable(handler: Handler, content: bytes) -> None:
    handler.start(503, 0)


def forbidden(handler: Handler, content: bytes) -> None:
    handler.start(403, 0)


def wrong_bytes(handler: Handler, content: bytes) -> None:
    handler.start(200, len(content))
    handler.wfile.write(b"x" * len(content))


def too_many_bytes(handler: Handler, content: bytes) -> None:
    handler.start(200, None)
    handler.wfile.write(content + b"more")


def wrong_range(handler: Handler, content: bytes) -> None:
    if not handler.offset():
        return truncated(handler, content)
    span = f"bytes 7-{len(content) - 1}/{len(content)}"
    handler.start(206, len(content) - 7, Content_Range=span)
    handler.wfile.write(content[7:])


def not_http(handler: Handler, content: bytes) -> None:
    handler.wfile.write(b"\0\xff 12 \r\n\r\n")


def slow(handler: Handler, content: bytes) -> None:
    """Respond correctly, but slowly enough for the client to be killed meanwhile."""
    rest = handler.start_from_offset(content)
    for start in range(0, len(rest), 8192):
        handler.wfile.write(rest[start : start + 8192])
        handler.wfile.flush()
        time.sleep(0.02)


def like_the_hub(handler: Handler, content: bytes) -> None:
    etag = f'"{hashlib.sha1(content).hexdigest()}"'
    rest = handler.start_from_offset(content, ETag=etag, X_Repo_Commit="c" * 40)
    if handler.command == "GET":
        handler.wfile.write(rest)


def redirect(to: str) -> Respond:
    return lambda handler, content: handler.start(302, 0, Location=to)


@contextmanager
def serving(files: dict[str, bytes]) -> Iterator[Server]:
    with Server(files) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
