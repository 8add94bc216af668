"""A proxy between one client and the API server that records all requests."""

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

_EXPIRED = {
    "type": "ERROR",
    "object": {"kind": "Status", "status": "Failure", "reason": "Expired", "code": 410},
}
"""The event for a watch whose resource version is too old."""
_HOP_BY_HOP = {"host", "connection", "transfer-encoding", "content-length", "authorization"}


@dataclass(frozen=True)
class Request:
    """One recorded request."""

    at: float
    """Seconds, ``time.monotonic``."""
    method: str
    path: str
    watch: bool

    @property
    def for_lease(self) -> bool:
        """Return whether it is of the leader election."""
        return "/leases/" in self.path or self.path.endswith("/leases")

    def __str__(self) -> str:
        return f"{'WATCH' if self.watch else self.method} {self.path}"


class Gateway:
    """Serves plain HTTP on this machine and forwards all requests with the kubeconfig's credentials."""

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        """Write a kubeconfig for clients of the proxy to ``folder``."""
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
        """Stop serving."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def since(self, moment: float) -> list[Request]:
        """Return the requests at or after ``moment``, by ``time.monotonic``."""
        return [request for request in self.requests if request.at >= moment]

    def hide(self, resource: str) -> None:
        """End the watches of ``resource`` and delay new ones until `show`."""

        async def end() -> None:
            self._hidden = resource
            for task, path in self._watches.items():
                if path.endswith(f"/{resource}"):
                    task.cancel()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(30)

    def show(self) -> None:
        """Allow watches again; those that were delayed get the error Expired."""
        self._hidden = ""

    async def _serve(self) -> int:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self._ssl, limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._handle)
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

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        watch = request.query.get("watch", "") in ("true", "1")
        self.requests.append(Request(time.monotonic(), request.method, request.path, watch))
        if not watch:
            return await self._forward(request)
        if self._hidden and request.path.endswith(f"/{self._hidden}"):
            while self._hidden:
                await asyncio.sleep(0.05)
            return web.json_response(_EXPIRED)
        task = asyncio.current_task()
        assert task is not None
        self._watches[task] = request.path
        try:
            return await self._forward(request)
        finally:
            del self._watches[task]

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_BY_HOP}
        url = URL(f"{self._server}{request.raw_path}", encoded=True)
        body = await request.read()
        async with self._http.request(
            request.method, url, headers=headers, data=body or None
        ) as response:
            headers = {k: v for k, v in response.headers.items() if k.lower() not in _HOP_BY_HOP}
            forwarded = web.StreamResponse(status=response.status, headers=headers)
            await forwarded.prepare(request)
            async for chunk in response.content.iter_any():
                await forwarded.write(chunk)
            await forwarded.write_eof()
            return forwarded


def _tls(config: Any, folder: Path) -> ssl.SSLContext:
    """Return the TLS context of a kubeconfig with embedded certificates."""
    values = {**config["clusters"][0]["cluster"], **config["users"][0]["user"]}
    files = {}
    for key in ("certificate-authority-data", "client-certificate-data", "client-key-data"):
        files[key] = folder / f"{key}.pem"
        files[key].write_bytes(base64.b64decode(values[key]))
    context = ssl.create_default_context(cafile=str(files["certificate-authority-data"]))
    context.load_cert_chain(files["client-certificate-data"], files["client-key-data"])
    return context
