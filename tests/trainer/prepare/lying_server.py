"""A local server that can be told to stall, truncate, redirect and lie, path by path."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[["Handler", bytes], None]


class Server(ThreadingHTTPServer):
    """Serves files by their path; how it answers a path can be told, once or for ever."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {f"/{name}": content for name, content in files.items()}
        self.answers: dict[str, list[Answer]] = {}
        self.asked = Counter[str]()
        self.ranges: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that went away."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked[path] += 1
        self.server.ranges.append(self.headers.get("Range"))
        if path not in self.server.files:
            self.send_error(404)
            return
        answers = self.server.answers.get(path, [])
        answer = (answers.pop(0) if len(answers) > 1 else answers[0]) if answers else honest
        answer(self, self.server.files[path])

    do_HEAD = do_GET  # noqa: N815  (as the library spells it)

    def start(self, code: int, length: int | None, **headers: str) -> None:
        self.send_response(code)
        if length is not None:
            self.send_header("Content-Length", str(length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def offset(self) -> int:
        return int((self.headers.get("Range") or "bytes=0-")[6:-1])

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


def honest(handler: Handler, content: bytes) -> None:
    offset = handler.offset()
    if offset and offset >= len(content):
        handler.start(416, 0)
    elif offset:
        span = f"bytes {offset}-{len(content) - 1}/{len(content)}"
        handler.start(206, len(content) - offset, Content_Range=span)
        handler.wfile.write(content[offset:])
    else:
        handler.start(200, len(content))
        handler.wfile.write(content)


def without_ranges(handler: Handler, content: bytes) -> None:
    handler.start(200, len(content))
    handler.wfile.write(content)


def cut_off(handler: Handler, content: bytes) -> None:
    handler.start(200, len(content))
    handler.wfile.write(content[: len(content) // 2])


def cut_off_unsaid(handler: Handler, content: bytes) -> None:
    handler.start(200, None)
    handler.wfile.write(content[: len(content) // 2])


def stalls(handler: Handler, content: bytes) -> None:
    handler.start(200, len(content))
    handler.wfile.write(content[:1000])
    handler.wfile.flush()
    time.sleep(1.5)


def never_answers(handler: Handler, content: bytes) -> None:
    time.sleep(1.5)


def drips(handler: Handler, content: bytes) -> None:
    """Send a byte now and then: no single wait is long."""
    handler.start(200, len(content))
    for byte in content[:40]:
        handler.wfile.write(bytes([byte]))
        handler.wfile.flush()
        time.sleep(0.05)


def hangs_up(handler: Handler, content: bytes) -> None:
    handler.connection.close()


def busy(handler: Handler, content: bytes) -> None:
    handler.start(503, 0)


def forbidden(handler: Handler, content: bytes) -> None:
    handler.start(403, 0)


def wrong_bytes(handler: Handler, content: bytes) -> None:
    handler.start(200, len(content))
    handler.wfile.write(b"x" * len(content))


def too_many_bytes(handler: Handler, content: bytes) -> None:
    handler.start(200, None)
    handler.wfile.write(content + b"more")


def other_range(handler: Handler, content: bytes) -> None:
    if not handler.offset():
        return cut_off(handler, content)
    span = f"bytes 7-{len(content) - 1}/{len(content)}"
    handler.start(206, len(content) - 7, Content_Range=span)
    handler.wfile.write(content[7:])


def nonsense(handler: Handler, content: bytes) -> None:
    handler.wfile.write(b"\0\xff 12 \r\n\r\n")


def slowly(handler: Handler, content: bytes) -> None:
    """Answer as an honest server with a thin line, so that there is time to be killed."""
    offset = handler.offset()
    length = len(content) - offset
    span = f"bytes {offset}-{len(content) - 1}/{len(content)}"
    handler.start(206 if offset else 200, length, **({"Content_Range": span} if offset else {}))
    for start in range(offset, len(content), 8192):
        handler.wfile.write(content[start : min(start + 8192, len(content))])
        handler.wfile.flush()
        time.sleep(0.02)


def as_the_hub(handler: Handler, content: bytes) -> None:
    offset = handler.offset()
    span = {"Content_Range": f"bytes {offset}-{len(content) - 1}/{len(content)}"} if offset else {}
    etag = f'"{hashlib.sha1(content).hexdigest()}"'
    handler.start(
        206 if offset else 200, len(content) - offset, ETag=etag, X_Repo_Commit="c" * 40, **span
    )
    if handler.command == "GET":
        handler.wfile.write(content[offset:])


def redirect(to: str) -> Answer:
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
