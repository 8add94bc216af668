"""A gateway between one client and the API server, which takes notes of all that passes."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from yarl import URL

_TOO_OLD = {
    "type": "ERROR",
    "object": {"kind": "Status", "status": "Failure", "reason": "Expired", "code": 410},
}
"""What an API server says that does not remember the version from which somebody wants to watch."""
_OF_ONE_HOP = {"host", "connection", "transfer-encoding", "content-length", "authorization"}


@dataclass(frozen=True)
class Request:
    """One request, as it arrived."""

    at: float
    """Seconds, ``time.monotonic``."""
    method: str
    path: str
    watch: bool

    @property
    def for_lease(self) -> bool:
        """Return whether it belongs to the election."""
        return "/leases/" in self.path or self.path.endswith("/leases")

    def __str__(self) -> str:
        return f"{'WATCH' if self.watch else self.method} {self.path}"


class Gateway:
    """Serves plain HTTP on this machine and passes everything on with the kubeconfig's rights."""

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        """Write to ``folder`` the kubeconfig of those who come through here."""
        self.requests: list[Request] = []
        self.kubeconfig = folder / "gateway.kubeconfig"
        config = json.loads(kubeconfig.read_text())
        self._server = config["clusters"][0]["cluster"]["server"]
        self._ssl = _tls(config, folder)
        self._hidden = ""
        self._watches: dict[asyncio.Task[Any], str] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def start(self) -> None:
        """Serve until `stop`."""
        self._thread.start()
        port = asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(30)
        cluster = {"name": "gateway", "cluster": {"server": f"http://127.0.0.1:{port}"}}
        context = {"name": "gateway", "context": {"cluster": "gateway", "user": "gateway"}}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [cluster],
            "users": [{"name": "gateway", "user": {"token": "unused"}}],
            "contexts": [context],
            "current-context": "gateway",
        }
        self.kubeconfig.write_text(json.dumps(config))

    def stop(self) -> None:
        """End everything."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def since(self, moment: float) -> list[Request]:
        """Return what arrived at or after ``moment``, by ``time.monotonic``."""
        return [request for request in self.requests if request.at >= moment]

    def hide(self, resource: str) -> None:
        """End the watches of ``resource``, and let nobody watch it until `show`."""

        async def end() -> None:
            self._hidden = resource
            for task, path in self._watches.items():
                if path.endswith(f"/{resource}"):
                    task.cancel()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(30)

    def show(self) -> None:
        """Let everybody watch again; who waited for it learns that what he knew is too old to go on from."""
        self._hidden = ""

    async def _serve(self) -> int:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self._ssl, limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return int(self._runner.addresses[0][1])

    async def _close(self) -> None:
        await self._runner.cleanup()
        await self._http.close()
        await asyncio.sleep(0.25)  # TLS connections close a moment after their session

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        watch = request.query.get("watch", "") in ("true", "1")
        self.requests.append(Request(time.monotonic(), request.method, request.path, watch))
        if not watch:
            return await self._passed_on(request)
        if self._hidden and request.path.endswith(f"/{self._hidden}"):
            while self._hidden:
                await asyncio.sleep(0.05)
            return web.json_response(_TOO_OLD)
        task = asyncio.current_task()
        assert task is not None
        self._watches[task] = request.path
        try:
            return await self._passed_on(request)
        finally:
            del self._watches[task]

    async def _passed_on(self, request: web.Request) -> web.StreamResponse:
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _OF_ONE_HOP}
        url = URL(f"{self._server}{request.raw_path}", encoded=True)
        body = await request.read()
        async with self._http.request(
            request.method, url, headers=headers, data=body or None
        ) as answer:
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in _OF_ONE_HOP}
            passed = web.StreamResponse(status=answer.status, headers=kept)
            await passed.prepare(request)
            async for chunk in answer.content.iter_any():
                await passed.write(chunk)
            await passed.write_eof()
            return passed


def _tls(config: Any, folder: Path) -> ssl.SSLContext:
    """Return what a kubeconfig with its certificates inside says about whom to trust, and who one is."""
    given = {**config["clusters"][0]["cluster"], **config["users"][0]["user"]}
    files = {}
    for key in ("certificate-authority-data", "client-certificate-data", "client-key-data"):
        files[key] = folder / f"{key}.pem"
        files[key].write_bytes(base64.b64decode(given[key]))
    context = ssl.create_default_context(cafile=str(files["certificate-authority-data"]))
    context.load_cert_chain(files["client-certificate-data"], files["client-key-data"])
    return context
