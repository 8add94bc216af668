"""The endpoint of a process, served while a test asks it."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry

from fluxtrain.rendezvous.http_server import host_port
from fluxtrain.report.endpoint import serve
from fluxtrain.runtime.progress import Progress


@contextmanager
def served(
    progress: Progress | None = None,
    address: str = "127.0.0.1",
    port: int | None = None,
    registry: CollectorRegistry | None = None,
    **page: Any,
) -> Iterator[int]:
    """Serve ``progress``, by default that of a process that has just begun; yield the port."""
    progress = progress or Progress()
    stop = serve(registry or CollectorRegistry(), progress, address, port, **page)
    assert stop is not None
    try:
        yield progress.read()["port"]
    finally:
        stop()


def get(port: int, path: str = "/", host: str = "127.0.0.1") -> str:
    with urllib.request.urlopen(f"http://{host_port(host, port)}{path}", timeout=5) as answer:
        text: str = answer.read().decode()
        return text
