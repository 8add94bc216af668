"""/metrics, /healthz and /readyz of the operator."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

STUCK_SECONDS = 300.0
"""A reconcile that takes longer is stuck: the replica is not healthy and kubelet restarts it."""
SILENT_SECONDS = 10.0
"""A replica that has not heard from the API server for so long could not lead: it is not ready."""


class Health:
    """Whether this replica lives and does its work."""

    def __init__(self) -> None:
        """Start unready: nothing has been heard from the API server yet."""
        self._heard = float("-inf")
        self._begun: dict[object, float] = {}

    def hear(self) -> None:
        """Note that the API server has answered."""
        self._heard = time.monotonic()

    def begin(self, work: object) -> None:
        """Note that ``work`` begins."""
        self._begun[work] = time.monotonic()

    def end(self, work: object) -> None:
        """Note that ``work`` is done."""
        self._begun.pop(work, None)

    @property
    def ready(self) -> bool:
        """Return whether this replica leads or would take over: the election has had an answer lately."""
        return time.monotonic() - self._heard < SILENT_SECONDS

    @property
    def alive(self) -> bool:
        """Return whether no work has been under way for too long."""
        now = time.monotonic()
        return all(now - begun < STUCK_SECONDS for begun in self._begun.values())


async def serve(
    registry: CollectorRegistry, health: Health, address: str, port: int
) -> Callable[[], Awaitable[None]]:
    """Serve until the returned function is called and awaited."""

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), content_type="text/plain")

    async def healthz(request: web.Request) -> web.Response:
        return _answer(health.alive, "a reconcile is stuck")

    async def readyz(request: web.Request) -> web.Response:
        return _answer(health.ready, "no answer from the API server")

    app = web.Application()
    app.add_routes(
        [web.get("/metrics", metrics), web.get("/healthz", healthz), web.get("/readyz", readyz)]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, address, port).start()
    return runner.cleanup


def _answer(good: bool, why_not: str) -> web.Response:
    return web.Response(text="ok\n") if good else web.Response(text=f"{why_not}\n", status=503)
