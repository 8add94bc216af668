"""The operator's HTTP server: /metrics, /healthz and /readyz."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

STUCK_SECONDS = 300.0
"""A reconcile that takes longer is stuck: the liveness probe fails and kubelet restarts the replica."""
SILENT_SECONDS = 10.0
"""A replica without a response from the API server for so long could not lead: it is not ready."""


class Health:
    """What the liveness and readiness probes report."""

    def __init__(self) -> None:
        """Start unready, as the API server has not responded yet."""
        self._last_response = float("-inf")
        self._started: dict[object, float] = {}

    def record_response(self) -> None:
        """Record a response of the API server."""
        self._last_response = time.monotonic()

    def start_work(self, work: object) -> None:
        """Record the start of ``work``."""
        self._started[work] = time.monotonic()

    def finish_work(self, work: object) -> None:
        """Record the end of ``work``."""
        self._started.pop(work, None)

    @property
    def ready(self) -> bool:
        """Return whether this replica leads or could take over: the API server has responded recently."""
        return time.monotonic() - self._last_response < SILENT_SECONDS

    @property
    def alive(self) -> bool:
        """Return whether no work is stuck."""
        now = time.monotonic()
        return all(now - started < STUCK_SECONDS for started in self._started.values())


async def serve(
    registry: CollectorRegistry, health: Health, address: str, port: int
) -> Callable[[], Awaitable[None]]:
    """Serve until the returned function is called and awaited."""

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), content_type="text/plain")

    async def healthz(request: web.Request) -> web.Response:
        return _probe(health.alive, "a reconcile is stuck")

    async def readyz(request: web.Request) -> web.Response:
        return _probe(health.ready, "no response from the API server")

    app = web.Application()
    app.add_routes(
        [web.get("/metrics", metrics), web.get("/healthz", healthz), web.get("/readyz", readyz)]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, address, port).start()
    return runner.cleanup


def _probe(passed: bool, failure: str) -> web.Response:
    return web.Response(text="ok\n") if passed else web.Response(text=f"{failure}\n", status=503)
