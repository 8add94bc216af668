"""The port with a trainer's metrics under attack: it answers, and its connections stay within bounds.

Clients that send nothing, send slowly or send too much keep no other from it.
"""

from __future__ import annotations

import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from tests.trainer.rendezvous.hostile.attacks import Target, open_connections, raw, repeated, slowly

from fluxtrain.rendezvous.http_server import MAX_HEAD, STATUS_BOUNDS
from fluxtrain.report.endpoint import serve
from fluxtrain.runtime.progress import Progress

CLIENTS = 200
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
        seconds = seconds_of_answer(port, "metrics")
        print(f"{seconds * 1e3:8.1f} ms  {open_sockets():5} files  {what:40} {answer}")
        assert "root:" not in answer
    deadline = time.monotonic() + 20
    while open_sockets() > before + STATUS_BOUNDS.connections:
        assert time.monotonic() < deadline, "connections stay open"
        time.sleep(0.1)


def open_sockets() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def seconds_of_answer(port: int, path: str = "progress") -> float:
    begin = time.monotonic()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=20) as answer:
        assert answer.status == 200
    return time.monotonic() - begin


@pytest.mark.parametrize(
    "sent", [b"", b"GET /metrics HTTP/1.1\r\nX: ", b"GET /metrics HTTP/1.1\r\n"]
)
def test_many_slow_clients_keep_nobody_out(port: int, sent: bytes) -> None:
    with ExitStack() as stack:
        clients = []
        for _ in range(CLIENTS):
            clients.append(stack.enter_context(socket.create_connection(("127.0.0.1", port))))
            clients[-1].sendall(sent)
        times = [seconds_of_answer(port) for _ in range(5)]
        for client in clients:
            client.settimeout(5)
        ended = sum(_has_ended(client) for client in clients[: -STATUS_BOUNDS.connections])
    print(f"answers after {max(times):.2f} s at most, beside {CLIENTS} clients")
    assert max(times) < 5
    assert ended == CLIENTS - STATUS_BOUNDS.connections  # the oldest are shut down, at once


def test_a_request_that_is_too_long_is_ended(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        head = b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * MAX_HEAD
        try:
            client.sendall(head)
            answer = client.recv(1 << 16)
        except ConnectionError:
            answer = b""
        assert b"200" not in answer
    assert seconds_of_answer(port) < 5


def _has_ended(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True
