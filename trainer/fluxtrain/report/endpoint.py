"""The HTTP endpoint of a trainer: a page for people, /metrics for Prometheus, /progress for the operator."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from fluxtrain.contract.process import LOAD, METRICS_PORT, PROGRESS_PATH, Phase, RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.errors import ConfigError
from fluxtrain.parallel.distributed import World
from fluxtrain.rendezvous.http_server import STATUS_BOUNDS, Handler, Server, host_port
from fluxtrain.report.metrics import Metrics
from fluxtrain.report.page import PAGE_HEADERS, progress_page
from fluxtrain.report.progress import node_report, write_progress
from fluxtrain.runtime.progress import Progress


class Endpoint:
    """The metrics and the progress of a process, served after `start`."""

    def __init__(self, config: RunConfig, paths: RunPaths, world: World) -> None:
        """Create the metrics of this rank of ``world``; the phase load begins."""
        self.metrics, self.progress = Metrics(world.progress), world.progress
        self.alive, self.set_phase = self.progress.alive, self.progress.enter
        self._port, self._address = config.logging.metrics_port, paths.metrics_address
        self._world_stack = world.exit_stack
        self._page: Page = partial(progress_page, paths.output.name)
        self._file: File = _no_file
        self.progress.update(
            rank=world.rank,
            numNodes=world.num_nodes,
            processRestarts=paths.process_restarts,
        )
        self.progress.enter(LOAD)

    def start(self, stack: ExitStack) -> None:
        """Serve until all ranks are done; write the progress for the agent when ``stack`` is closed."""
        stop = serve(
            *(self.metrics.registry, self.progress, self._address, self._port),
            lambda progress: self._page(progress),
            lambda name: self._file(name),
        )
        if stop is not None:
            self._world_stack.callback(stop)
        stack.callback(write_progress, self.progress)

    def show(self, page: Page, file: File) -> None:
        """Serve at / what ``page`` returns for the values of /progress, and its pictures, from now on."""
        self._page, self._file = page, file

    def step_done(self, **values: object) -> None:
        """Record a finished step of the task and update ``values``."""
        self.metrics.last_progress.set(time.time())
        self.progress.step_done(**values)

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Set ``phase`` and afterwards the previous one, which an error does not restore."""
        before = self.progress.phase
        self.set_phase(phase)
        yield
        self.set_phase(before)


Page = Callable[[Mapping[str, Any]], str]
"""Returns the page for the values of /progress."""
File = Callable[[str], bytes | None]
"""Returns the PNG file of a page's picture by its address; None if there is none."""


def _no_file(name: str) -> None:
    return None


LOOPBACK = "127.0.0.1"
_PLAIN_PAGE: Page = partial(progress_page, "fluxtrain")


def serve(
    registry: CollectorRegistry,
    progress: Progress,
    address: str,
    port: int | None,
    page: Page = _PLAIN_PAGE,
    file: File = _no_file,
) -> Callable[[], None] | None:
    """Serve /metrics, /progress and /healthz in a thread; return a function that stops it, None for port 0.

    At / is what ``page`` returns for the progress; ``file`` returns its pictures. A pod's port is on the
    loopback address too, which ``kubectl port-forward`` connects to, unless somebody else has it.

    ``port`` None means METRICS_PORT, or a free port if that is in use. Sets "port" of ``progress``. Raises
    ConfigError if the requested port is in use.
    """
    if port == 0:
        return None
    handler = _handler(registry, progress, page, file)
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
            f"cannot listen on {host_port(address, port or METRICS_PORT)} ({error.strerror}); "
            "leave the field out for a free port, or 0 for none",
        ) from None


def _handler(
    registry: CollectorRegistry,
    progress: Progress,
    page: Page,
    file: File,
) -> type[Handler]:
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
                html = page(progress.read()).encode()
                self.respond(200, html, "text/html; charset=utf-8", PAGE_HEADERS)
            elif (picture := file(self.path[1:])) is not None:
                self.respond(200, picture, "image/png", PAGE_HEADERS)
            else:
                self.send_error(404)

    return OwnHandler
