"""Debian's Chromium without a window, driven through its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from cluster.programs.packages import ensure_programs, program

PROGRAM = "chromium-headless-shell"
_SECONDS = 60


def installed() -> str:
    """Return the path of the browser, which is installed if it is missing."""
    ensure_programs({PROGRAM: PROGRAM})
    return program(PROGRAM)


class Tab:
    """A page that a test looks at and uses; ``refused`` are what its policy forbade and its errors."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, loop: Any) -> None:
        self._socket, self._loop, self._number = socket, loop, 0
        self.refused, self.requests = list[str](), list[str]()

    def call(self, method: str, **parameters: Any) -> Any:
        """Return the result of a command of the protocol."""
        return self._loop.run_until_complete(
            asyncio.wait_for(self._call(method, parameters), _SECONDS)
        )

    async def _call(self, method: str, parameters: dict[str, Any]) -> Any:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            answer = await self._socket.receive_json()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            given = answer.get("params", {})
            if answer.get("method") == "Network.requestWillBeSent":
                self.requests.append(given["request"]["url"])
            if answer.get("method") == "Log.entryAdded":
                self.refused.append(given["entry"]["text"])
            if answer.get("method") == "Runtime.exceptionThrown":
                self.refused.append(str(given["exceptionDetails"]))

    def run(self, script: str) -> Any:
        given = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in given, given
        return given["result"].get("value")

    def wait_for(self, script: str) -> None:
        """Return when the value of ``script`` is true."""
        deadline = time.monotonic() + _SECONDS
        while not self.run(script):
            assert time.monotonic() < deadline, script
            time.sleep(0.1)

    def open(self, address: str, width: int = 1200, height: int = 1000, dark: bool = False) -> None:
        """Open ``address`` in a window of this size."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=address)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def key(self, name: str) -> None:
        """Press and release a key."""
        code = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Escape": 27}[
            name
        ]
        for kind in ("rawKeyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code
            )

    def mouse(self, kind: str, x: float, y: float, buttons: int = 0) -> None:
        """Move, press (mousePressed) or release the mouse at a place of the window."""
        button = "left" if buttons or kind == "mouseReleased" else "none"
        self.call(
            "Input.dispatchMouseEvent",
            type=kind,
            x=x,
            y=y,
            button=button,
            buttons=buttons,
            clickCount=1,
        )

    def picture(self, path: Path, whole: bool = True) -> None:
        """Write a screenshot to ``path``."""
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))


@contextmanager
def tab(folder: Path) -> Iterator[Tab]:
    """Start a browser, whose profile is below ``folder``, and yield its page."""
    profile = folder / "profile"
    options = [
        "--no-sandbox",
        "--disable-gpu",
        "--remote-debugging-port=0",
        f"--user-data-dir={profile}",
    ]
    process = subprocess.Popen(
        [installed(), *options, "about:blank"], stderr=subprocess.DEVNULL, start_new_session=True
    )
    loop = asyncio.new_event_loop()
    try:
        address = _address(profile / "DevToolsActivePort", process)
        session = loop.run_until_complete(_session())
        try:
            yield Tab(loop.run_until_complete(_socket(session, address)), loop)
        finally:
            loop.run_until_complete(session.close())
    finally:
        if process.poll() is None:  # Debian's command is a script, and the browser its child
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=_SECONDS)
        loop.close()


def _address(path: Path, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + _SECONDS
    while not (path.exists() and "\n" in path.read_text()):
        assert process.poll() is None, "the browser does not start"
        assert time.monotonic() < deadline, "the browser is not ready"
        time.sleep(0.05)
    return f"http://127.0.0.1:{path.read_text().split()[0]}"


async def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession()


async def _socket(session: aiohttp.ClientSession, address: str) -> aiohttp.ClientWebSocketResponse:
    async with session.get(f"{address}/json/list") as answer:
        pages = [each for each in await answer.json() if each["type"] == "page"]
    return await session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0)
