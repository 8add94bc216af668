"""An HTTP server whose clients keep nobody out: connections are bounded in number, time and heads."""

from __future__ import annotations

import resource
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from http import HTTPStatus
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from typing import Any, NamedTuple

REQUEST_SECONDS = 10.0
"""A connection is closed this long after its last answer: a request must arrive and be answered by then."""


class Connections:
    """The open connections of a server, the one with the oldest answer first; thread-safe.

    One without an answer counts from its start. Beyond a bound the oldest are shut down, so that a client
    that sends nothing, or sends slowly, keeps nobody else out.
    """

    def __init__(
        self, most: int, most_of_address: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Keep at most ``most`` connections, and ``most_of_address`` from one address."""
        self._most, self._most_of_address, self._clock = most, most_of_address, clock
        self._lock = threading.Lock()
        self._open: OrderedDict[socket.socket, tuple[str, float]] = OrderedDict()
        self._by_address: dict[str, OrderedDict[socket.socket, None]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: socket.socket, address: str) -> None:
        """Add a new connection from ``address``; shut down the oldest ones that are too many now."""
        with self._lock:
            self._open[connection] = (address, self._clock())
            of_address = self._by_address.setdefault(address, OrderedDict())
            of_address[connection] = None
            if len(of_address) > self._most_of_address:
                self._shut_down(next(iter(of_address)))
            if len(self._open) > self._most:
                self._shut_down(next(iter(self._open)))

    def renew(self, connection: socket.socket) -> None:
        """Record that ``connection`` was answered now."""
        with self._lock:
            if connection in self._open:
                address, _ = self._open[connection]
                self._open[connection] = (address, self._clock())
                self._open.move_to_end(connection)
                self._by_address[address].move_to_end(connection)

    def remove(self, connection: socket.socket) -> None:
        """Forget ``connection``, which is about to be closed."""
        with self._lock:
            self._forget(connection)

    def expire(self) -> None:
        """Shut down the connections that have had no answer for too long."""
        with self._lock:
            before = self._clock() - REQUEST_SECONDS
            while self._open:
                connection, (_, answered) = next(iter(self._open.items()))
                if answered > before:
                    break
                self._shut_down(connection)

    def shut_down(self) -> None:
        with self._lock:
            while self._open:
                self._shut_down(next(iter(self._open)))

    def _shut_down(self, connection: socket.socket) -> None:
        """End all reading from and writing to ``connection``; its thread closes it."""
        self._forget(connection)
        with suppress(OSError):  # the client has disconnected
            connection.shutdown(socket.SHUT_RDWR)

    def _forget(self, connection: socket.socket) -> None:
        address, _ = self._open.pop(connection, ("", 0.0))
        of_address = self._by_address.get(address)
        if of_address is not None:
            of_address.pop(connection, None)
            if not of_address:
                del self._by_address[address]


def raise_limit(wanted: int) -> int:
    """Let this process open ``wanted`` files, or as many as it may; return its limit.

    Containers often begin with 1024 and may have more. A server that has none left accepts nobody.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else soft


MAX_HEAD = 1 << 14
"""Bytes of a request before its body."""


class RequestHead:
    """The file of a connection, of which the lines before a body are bounded together."""

    def __init__(self, file: BufferedIOBase) -> None:
        """Read from ``file``; set ``left`` to `MAX_HEAD` before each request."""
        self._file, self.left = file, MAX_HEAD
        self.read, self.close = file.read, file.close

    def readline(self, size: int) -> bytes:
        """Return the next line, at most ``size`` bytes; LineTooLong if the lines have too many together."""
        line = self._file.readline(min(size, self.left + 1))
        self.left -= len(line)
        if self.left < 0:
            raise LineTooLong("request")
        return line


_POLL_SECONDS = 0.1
"""How long `Server.stop` may take, and how often slow connections are looked for."""


class Bounds(NamedTuple):
    """How many connections a server keeps."""

    connections: int
    of_address: int


EVERY_ADDRESS = "::"
"""Listens on all IPv6 and IPv4 addresses."""


def host_port(host: str, port: int | str) -> str:
    """Return host:port as URLs have it: an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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
        host, port = address
        if host == EVERY_ADDRESS and not socket.has_dualstack_ipv6():
            host = "0.0.0.0"
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)

    def server_bind(self) -> None:
        """Bind the socket, for IPv4 too if it listens on every address."""
        if self.server_address[0] == EVERY_ADDRESS:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

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
