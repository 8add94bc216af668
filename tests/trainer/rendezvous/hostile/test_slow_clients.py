"""Clients that send nothing, send slowly or send too much keep no other from the metrics of a trainer."""

from __future__ import annotations

import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from prometheus_client import CollectorRegistry

from fluxtrain.rendezvous.http_server import MAX_HEAD, STATUS_BOUNDS
from fluxtrain.report.endpoint import serve
from fluxtrain.runtime.progress import Progress

CLIENTS = 200


@pytest.fixture
def port() -> Iterator[int]:
    progress = Progress()
    stop = serve(CollectorRegistry(), progress, "127.0.0.1", None)
    assert stop is not None
    yield int(progress.read()["port"])
    stop()


def seconds_of_answer(port: int) -> float:
    begin = time.monotonic()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/progress", timeout=20) as answer:
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
