"""The step of this node's trainers, read from /progress of local rank 0, for the agent's heartbeats."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.request import ProxyHandler, build_opener

_POLL_SECONDS = 1.0
_TIMEOUT_SECONDS = 2.0
_MAX_BYTES = 1 << 16


def read_step(address: str, port: int) -> int | None:
    """Return the step at ``address:port``; None without a valid response, as before the first step."""
    host = f"[{address}]" if ":" in address else address
    with suppress(OSError, ValueError):
        opener = build_opener(ProxyHandler({}))
        with opener.open(f"http://{host}:{port}/progress", timeout=_TIMEOUT_SECONDS) as response:
            progress = json.loads(response.read(_MAX_BYTES))
        step = progress.get("step") if isinstance(progress, dict) else None
        return step if type(step) is int and 0 <= step < 1 << 53 else None
    return None


@contextmanager
def reported_steps(address: str, port: int, report: Callable[[int], None]) -> Iterator[None]:
    """Call ``report`` with each new step of the trainers, once a second, until the end."""
    stopped = threading.Event()

    def poll() -> None:
        last = None
        while not stopped.wait(_POLL_SECONDS):
            step = read_step(address, port)
            if step is not None and step != last:
                report(step)
                last = step

    thread = threading.Thread(target=poll, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
