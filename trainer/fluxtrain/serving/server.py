"""An HTTP server whose clients keep nobody out: its connections, their time and their heads are bounded."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from http import HTTPStatus
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from fluxtrain.serving.connections import Connections
from fluxtrain.serving.request_head import MAX_HEAD, RequestHead

_POLL_SECONDS = 0.1
"""How long `Server.stop` may take, and how often slow connections are looked for."""


class Bounds(NamedTuple):
    """How many connections a server keeps."""

    connections: int
    of_address: int


STATUS_BOUNDS = Bounds(64, 8)
"""Of a port with a status, which the whole cluster reaches."""


class Server(ThreadingHTTPServer):
    """Answers each connection in a thread of its own."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 1024

    def __init__(
        self, name: str, address: tuple[str, int], handler: type[Handler], bounds: Bounds
    ) -> None:
        """Listen on ``address``; ``name`` begins the lines that are printed. Nothing is served yet."""
        self._name, self.connections = name, Connections(*bounds)
        super().__init__(address, handler)

    def start(self) -> None:
        """Serve in a thread."""
        threading.Thread(
            target=self.serve_forever, args=(_POLL_SECONDS,), name=self._name, daemon=True
        ).start()

    def stop(self) -> None:
        """Stop serving, and close the port and all connections."""
        self.shutdown()
        self.connections.shut_down()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve ``request`` in a thread."""
        self.connections.add(request, client_address[0])
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close ``request``."""
        self.connections.remove(request)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close the connections that are too slow."""
        self.connections.expire()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Drop a connection that failed; print one line, none if the client or the server disconnected."""
        error = sys.exception()
        if not isinstance(error, OSError):
            print(f"{self._name}: {client_address[0]}: {error!r}", file=sys.stderr, flush=True)


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection, with its methods such as ``do_GET``."""

    server: Server
    server_version, sys_version = "fluxtrain", ""
    wbufsize = -1  # an answer is sent at once

    def setup(self) -> None:
        """Bound the lines of each request."""
        super().setup()
        self._head = self.rfile = RequestHead(self.rfile)  # type: ignore[assignment]

    def handle_one_request(self) -> None:
        """Answer one request; close the connection if its first line is too long."""
        self._head.left = MAX_HEAD
        try:
            super().handle_one_request()
        except LineTooLong:
            self.close_connection = True

    def respond(
        self, status: int, body: bytes, kind: str, headers: Iterable[tuple[str, str]] = ()
    ) -> None:
        """Send ``body`` of content type ``kind``; only after a good answer the connection has more time."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()
        if status == HTTPStatus.OK:
            self.server.connections.renew(self.connection)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing for each request."""
