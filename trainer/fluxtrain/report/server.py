"""The HTTP endpoint of a trainer: /metrics for Prometheus, /progress for the operator, /healthz."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from fluxtrain.contract.launch import METRICS_PORT
from fluxtrain.errors import ConfigError
from fluxtrain.progress import Progress
from fluxtrain.report.node_progress import node_report

_MAX_CONNECTIONS = 64
_READ_SECONDS = 10.0
_STOP_SECONDS = 0.1
"""How long the server may take to stop: a task that starts waits for it."""


def serve(
    registry: CollectorRegistry, progress: Progress, address: str, port: int | None
) -> Callable[[], None] | None:
    """Serve /metrics, /progress and /healthz in a thread; return a function that stops it, None for port 0.

    ``port`` None means METRICS_PORT, or a free port if that is in use. Sets "port" of ``progress``. Raises
    ConfigError if the requested port is in use.
    """
    if port == 0:
        return None
    server = _bind(_handler(registry, progress), address, port)
    progress.update(port=server.server_address[1])
    thread = threading.Thread(
        target=server.serve_forever, args=(_STOP_SECONDS,), name="metrics", daemon=True
    )
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()

    return stop


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._connections = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve ``request`` in a thread, or close it if too many are open."""
        if self._connections.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print one line for an error; none if the client has disconnected."""
        error = sys.exception()
        if not isinstance(error, OSError):
            print(f"metrics: {client_address[0]}: {error!r}", file=sys.stderr, flush=True)


def _bind(
    handler: type[BaseHTTPRequestHandler], address: str, port: int | None
) -> ThreadingHTTPServer:
    try:
        return _Server((address, METRICS_PORT if port is None else port), handler)
    except OSError as error:
        if port is None:
            return _Server((address, 0), handler)
        raise ConfigError(
            "spec.run.logging.metrics_port",
            port,
            f"cannot listen on {address}:{port} ({error.strerror}); "
            "leave the field out for a free port, or 0 for none",
        ) from None


def _handler(registry: CollectorRegistry, progress: Progress) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _READ_SECONDS

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._respond(generate_latest(registry), "text/plain; version=0.0.4")
            elif self.path == "/progress":
                values = {**progress.read(), "ranks": node_report()}
                self._respond(json.dumps(values).encode(), "application/json")
            elif self.path == "/healthz":
                self._respond(b"ok\n", "text/plain")
            else:
                self.send_error(404)

        def _respond(self, body: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Do not log requests."""

    return Handler
