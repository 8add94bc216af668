"""The port with a trainer's metrics under attack: it answers, and its connections stay within bounds."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from tests.trainer.rendezvous.hostile.attacks import Target, open_connections, raw, repeated, slowly

from fluxtrain.rendezvous.http_server import STATUS_BOUNDS
from fluxtrain.report.endpoint import serve
from fluxtrain.runtime.progress import Progress

_GET = b"GET /metrics HTTP/1.1\r\n"
ATTACKS = {
    "300 half-open from 64 addresses": open_connections(300, b"", 64),
    "300 heads without an end": open_connections(300, _GET, 64),
    "100 senders of a byte at a time": slowly(_GET),
    "requests without pause": repeated(raw(b"GET /progress HTTP/1.0\r\n\r\n")),
    "1,000 requests in a pipeline": raw((_GET + b"\r\n") * 1000),
    "a body of a gigabyte": raw(
        _GET + b"Content-Length: 999999999\r\n\r\n" + b"GET /x HTTP/1.1\r\n\r\n" * 100_000
    ),
    "two lengths": raw(_GET + b"Content-Length: 2\r\nContent-Length: 40\r\n\r\n{}"),
    "100,000 headers": raw(_GET + b"A: b\r\n" * 100_000),
    "a first line of a megabyte": raw(b"GET /" + b"a" * 1_000_000),
    "a file": raw(b"GET /../../../etc/passwd HTTP/1.0\r\n\r\n"),
    "another method": raw(b"DELETE /metrics HTTP/1.1\r\n\r\n"),
    "TLS": raw(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 200),
}


@pytest.fixture
def port() -> Iterator[int]:
    progress = Progress()
    stop = serve(CollectorRegistry(), progress, "127.0.0.1", None)
    assert stop is not None
    yield int(progress.read()["port"])
    stop()


@pytest.mark.slow
def test_prometheus_is_answered_after_each_attack(port: int) -> None:
    target = Target(port, port, b"", b"", "")
    before = open_sockets()
    for what, attack in ATTACKS.items():
        answer = attack(target)
        begin = time.monotonic()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as response:
            assert response.status == 200, what
        seconds = time.monotonic() - begin
        print(f"{seconds * 1e3:8.1f} ms  {open_sockets():5} files  {what:40} {answer}")
        assert "root:" not in answer
    deadline = time.monotonic() + 20
    while open_sockets() > before + STATUS_BOUNDS.connections:
        assert time.monotonic() < deadline, "connections stay open"
        time.sleep(0.1)


def open_sockets() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
