"""Which connections a server keeps: numbers, addresses, time."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from fluxtrain.rendezvous.http_server import REQUEST_SECONDS, Connections


class Clients:
    """Clients of a server with ``connections``, on a clock of their own."""

    def __init__(self, most: int = 4, most_of_address: int = 2) -> None:
        self.now = 0.0
        self.connections = Connections(most, most_of_address, clock=lambda: self.now)
        self.pairs: dict[str, tuple[socket.socket, socket.socket]] = {}

    def connect(self, *names: str) -> None:
        """Connect; the first letter of each name is the client's address."""
        for name in names:
            self.pairs[name] = socket.socketpair()
            self.connections.add(self.pairs[name][0], name[0])

    def answer(self, name: str) -> None:
        self.connections.renew(self.pairs[name][0])

    @property
    def open(self) -> list[str]:
        """Return the names of the clients whose connections are not shut down."""
        names = [name for name, (_, client) in self.pairs.items() if not _has_ended(client)]
        assert len(names) == len(self.connections)
        return names


def _has_ended(client: socket.socket) -> bool:
    try:
        return client.recv(1, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False


@pytest.fixture
def clients() -> Iterator[Clients]:
    clients = Clients()
    yield clients
    for server, client in clients.pairs.values():
        server.close()
        client.close()


def test_beyond_the_bound_the_oldest_is_shut_down(clients: Clients) -> None:
    clients.connect("a1", "b1", "c1", "d1")
    assert clients.open == ["a1", "b1", "c1", "d1"]
    clients.connect("e1")
    assert clients.open == ["b1", "c1", "d1", "e1"]


def test_an_address_keeps_nobody_else_out(clients: Clients) -> None:
    clients.connect("a1")
    clients.connect(*(f"b{number}" for number in range(9)))
    assert clients.open == ["a1", "b7", "b8"]


def test_an_answer_makes_a_connection_the_youngest(clients: Clients) -> None:
    clients.connect("a1", "a2", "b1", "c1")
    clients.answer("a1")
    clients.connect("a3")
    assert clients.open == ["a1", "b1", "c1", "a3"]
    clients.answer("b1")
    clients.connect("d1")
    assert clients.open == ["a1", "b1", "a3", "d1"]


def test_a_connection_without_an_answer_is_shut_down_in_time(clients: Clients) -> None:
    clients.connect("a1", "b1")
    clients.now = REQUEST_SECONDS - 0.1
    clients.connections.expire()
    assert clients.open == ["a1", "b1"]
    clients.answer("b1")
    clients.now = REQUEST_SECONDS
    clients.connections.expire()
    assert clients.open == ["b1"]
    clients.now *= 3
    clients.connections.expire()
    clients.connections.expire()
    assert clients.open == []


def test_all_are_shut_down_at_the_end(clients: Clients) -> None:
    clients.connect("a1", "a2", "b1")
    clients.connections.shut_down()
    clients.connections.shut_down()
    assert clients.open == []


def test_a_connection_that_was_closed_or_is_foreign_changes_nothing(clients: Clients) -> None:
    clients.connect("a1", "a2")
    server, client = clients.pairs.pop("a1")
    clients.connections.remove(server)
    clients.connections.remove(server)
    clients.connections.renew(server)
    server.close()
    client.close()
    clients.connect("a3")
    assert clients.open == ["a2", "a3"]
    clients.pairs["a2"][0].close()  # closed before it is forgotten
    clients.connect("a4")
    assert clients.open == ["a3", "a4"]
