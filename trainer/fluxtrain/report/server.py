"""The HTTP endpoint of a trainer: a page for people, /metrics for Prometheus, /progress for the operator."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress

from prometheus_client import CollectorRegistry, generate_latest

from fluxtrain.contract.launch import METRICS_PORT
from fluxtrain.contract.progress import PROGRESS_PATH
from fluxtrain.errors import ConfigError
from fluxtrain.progress import Progress
from fluxtrain.report.gallery.progress_page import PAGE_HEADERS, progress_page
from fluxtrain.report.node_progress import node_report
from fluxtrain.serving.server import STATUS_BOUNDS, Handler, Server

LOOPBACK = "127.0.0.1"


def serve(
    registry: CollectorRegistry,
    progress: Progress,
    address: str,
    port: int | None,
    page: Callable[[], str] | None = None,
) -> Callable[[], None] | None:
    """Serve /metrics, /progress and /healthz in a thread; return a function that stops it, None for port 0.

    At / is what ``page`` returns, or a page with the progress. A pod's port is on the loopback address too,
    which ``kubectl port-forward`` connects to, unless somebody else has it.

    ``port`` None means METRICS_PORT, or a free port if that is in use. Sets "port" of ``progress``. Raises
    ConfigError if the requested port is in use.
    """
    if port == 0:
        return None
    handler = _handler(registry, progress, page)
    server = _bind(handler, address, port)
    bound = server.server_address[1]
    progress.update(port=bound)
    servers = [server]
    if address != LOOPBACK:
        with suppress(OSError):  # on the network of the node, another pod may have it
            servers.append(Server("metrics", (LOOPBACK, bound), handler, STATUS_BOUNDS))
    for each in servers:
        each.start()

    def stop() -> None:
        for each in servers:
            each.stop()

    return stop


def _bind(handler: type[Handler], address: str, port: int | None) -> Server:
    def bind(port: int) -> Server:
        return Server("metrics", (address, port), handler, STATUS_BOUNDS)

    try:
        return bind(METRICS_PORT if port is None else port)
    except OSError as error:
        if port is None:
            return bind(0)
        raise ConfigError(
            "spec.run.logging.metrics_port",
            port,
            f"cannot listen on {address}:{port} ({error.strerror}); "
            "leave the field out for a free port, or 0 for none",
        ) from None


def _handler(
    registry: CollectorRegistry, progress: Progress, page: Callable[[], str] | None
) -> type[Handler]:
    def html() -> bytes:
        text = progress_page("fluxtrain", progress.read()) if page is None else page()
        return text.encode()

    class OwnHandler(Handler):
        def do_GET(self) -> None:  # noqa: N802  (of http.server)
            if self.path == "/metrics":
                self.respond(200, generate_latest(registry), "text/plain; version=0.0.4")
            elif self.path == PROGRESS_PATH:
                values = {**progress.read(), "ranks": node_report()}
                self.respond(200, json.dumps(values).encode(), "application/json")
            elif self.path == "/healthz":
                self.respond(200, b"ok\n", "text/plain")
            elif self.path == "/":
                self.respond(200, html(), "text/html; charset=utf-8", PAGE_HEADERS)
            else:
                self.send_error(404)

    return OwnHandler
