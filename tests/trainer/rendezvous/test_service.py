"""The rendezvous service over HTTP: signatures, repetitions, restarts and bad requests."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer

import pytest

from fluxtrain.errors import StorageError
from fluxtrain.rendezvous.client import Client
from fluxtrain.rendezvous.membership import Limits
from fluxtrain.rendezvous.messages import (
    PATH,
    SIGNATURE_HEADER,
    Heartbeat,
    Reply,
    reply_signature,
    request_signature,
)
from fluxtrain.rendezvous.service import Sessions, serve, serve_members

KEY = b"key of the job"


class Service:
    """A service on a free port of this machine; a restart keeps the port."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self.port = limits, 0
        self.clients: list[Client] = []
        self.start()

    def start(self) -> None:
        self.sessions = Sessions(self.limits)
        self.sessions._forms_after = self.sessions._membership.forms_after = 0
        self.server: ThreadingHTTPServer = serve(self.sessions, KEY, "127.0.0.1", self.port)
        self.port = self.server.server_address[1]
        self.status = serve_members(self.sessions, "127.0.0.1", 0)

    def stop(self) -> None:
        for client in self.clients:  # the process would end with its connections
            client._connection.close()
        for server in (self.server, self.status):
            server.shutdown()
            server.server_close()

    def client(self, name: str, attempt: int = 1, key: bytes = KEY) -> Client:
        beat = Heartbeat(sequence=0, attempt=attempt, agent=name, node=name, joining=True)
        self.clients.append(Client("127.0.0.1", self.port, key, beat))
        return self.clients[-1]

    def post(self, body: bytes, signature: str, path: str = PATH) -> tuple[int, bytes, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request("POST", path, body, {SIGNATURE_HEADER: signature})
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, content, response.getheader(SIGNATURE_HEADER, "")

    def get(self, path: str) -> tuple[int, bytes]:
        port = self.status.server_address[1]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", path)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, content


@pytest.mark.parametrize(
    ("attempt", "generations"), [(1, [4, 1]), (2, [1, 4]), (3, [1, 1]), (0, [1, 1])]
)
def test_a_generation_must_end_in_its_attempt_only(attempt: int, generations: list[int]) -> None:
    sessions = Sessions(Limits(1, 1), (attempt, 3), clock=lambda: 0.0)
    sessions._forms_after = 0.0
    replies = [
        sessions.heartbeat(
            Heartbeat(boot=sessions.boot, sequence=n, attempt=n, agent="a", node="a", joining=True)
        )
        for n in (1, 2)
    ]
    assert [reply.generation for reply in replies] == generations


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service(Limits(1, 2))
    yield service
    for client in service.clients:
        client._stopped.set()
        client._connection.close()
    service.stop()


def beat(**values: object) -> bytes:
    plain = Heartbeat(sequence=1, attempt=1, agent="a", node="a").model_dump()
    return json.dumps({**plain, **values}).encode()


def reply_of(client: Client) -> Reply:
    assert client.exchange()
    reply = client.reply
    assert reply is not None
    return reply


def test_two_clients_meet(service: Service) -> None:
    one, two = service.client("a"), service.client("b")
    assert reply_of(one).generation == 0
    assert reply_of(two).world == ("a", "b")
    assert reply_of(one).world == ("a", "b")
    status, content = service.get("/members")
    members = json.loads(content)
    assert (status, members["generation"], members["world"]) == (200, 1, ["a", "b"])
    assert set(members["alive"]) == {"a", "b"}
    assert service.get("/healthz") == (200, b"ok\n")
    assert service.get("/other")[0] == 404


def test_a_client_with_another_key_is_refused_and_changes_nothing(service: Service) -> None:
    assert not service.client("a", key=b"another").exchange()
    assert json.loads(service.get("/members")[1])["attempt"] == 0


def test_a_reply_that_is_not_signed_with_the_key_is_not_believed(service: Service) -> None:
    client = service.client("a")
    reply_of(client)
    client._key = KEY
    service.server.RequestHandlerClass.key = b"another"  # type: ignore[attr-defined]
    assert not client.exchange()


def test_a_repeated_request_changes_nothing(service: Service) -> None:
    boot = service.sessions.boot
    recorded = beat(boot=boot, joining=True)
    signature = request_signature(KEY, recorded)
    status, content, signed = service.post(recorded, signature)
    assert (status, signed) == (200, reply_signature(KEY, signature, content))
    leaving = beat(boot=boot, sequence=2, leaving=True)
    service.post(leaving, request_signature(KEY, leaving))
    assert service.post(recorded, signature)[0] == 200
    assert service.sessions._membership._agents == {}


def test_a_request_to_an_earlier_process_of_the_service_changes_nothing(service: Service) -> None:
    recorded = beat(boot="another", joining=True)
    status, content, _ = service.post(recorded, request_signature(KEY, recorded))
    assert (status, json.loads(content)["boot"]) == (200, service.sessions.boot)
    assert service.sessions._membership._agents == {}


def test_a_service_that_starts_empty_learns_the_generation(service: Service) -> None:
    clients = [service.client("a"), service.client("b")]
    for client in (*clients, clients[0]):
        reply_of(client)
    for client in clients:
        client.update(generation=1, joining=False, world=("a", "b"))
    service.stop()
    assert not clients[0].exchange()
    service.start()
    replies = [reply_of(client) for client in (*clients, *clients)]
    assert [reply.reform for reply in replies] == [False] * 4
    assert replies[-1].generation == 1
    assert service.sessions._membership.world == ("a", "b")


def test_agents_of_an_earlier_attempt_are_told_that_it_is_over(service: Service) -> None:
    old, new = service.client("a", attempt=1), service.client("b", attempt=2)
    assert not reply_of(old).closed
    assert not reply_of(new).closed
    assert reply_of(old).closed
    assert json.loads(service.get("/members")[1])["attempt"] == 2


def test_a_thread_sends_heartbeats_until_it_is_stopped(service: Service) -> None:
    service.sessions.limits = Limits(1, 1)
    client = service.client("a")
    client.start()
    deadline = time.monotonic() + 30
    while client.reply is None or client.reply.generation == 0:
        assert time.monotonic() < deadline
        client.next_reply(1)
    client.stop(leaving=True)
    assert service.sessions._membership._agents == {}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"agent": ""}, "at least 1 character"),
        ({"agent": "a b"}, "match pattern"),
        ({"sequence": -1}, "greater than or equal to 0"),
        ({"sequence": 1 << 60}, "less than"),
        ({"generation": True}, "valid integer"),
        ({"world": ["a"] * 4097}, "at most 4096"),
    ],
)
def test_a_signed_request_with_bad_values_is_refused(
    service: Service, values: dict[str, object], message: str
) -> None:
    body = beat(**values)
    status, content, _ = service.post(body, request_signature(KEY, body))
    assert (status, message in content.decode()) == (400, True), content


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"POST /heartbeat HTTP/1.1\r\n\r\n",
        b"POST /heartbeat HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /heartbeat HTTP/1.1\r\nContent-Length: 2000000\r\n\r\n",
        b"POST /other HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /heartbeat HTTP/1.1\r\nContent-Length: 2\r\nFluxtrain-Signature: \xff\r\n\r\n{}",
        b"\x00\x01\x02\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
    ],
)
def test_a_bad_request_harms_nobody(service: Service, request_bytes: bytes) -> None:
    with socket.create_connection(("127.0.0.1", service.port), timeout=10) as connection:
        connection.sendall(request_bytes)
        answer = connection.recv(1000)
        assert any(status in answer for status in (b"400", b"403", b"414"))
    assert reply_of(service.client("a")).boot == service.sessions.boot


def test_fields_of_a_newer_version_are_ignored(service: Service) -> None:
    body = beat(boot=service.sessions.boot, weather="fine", joining=True)
    assert service.post(body, request_signature(KEY, body))[0] == 200
    assert "a" in service.sessions._membership._agents
    assert Reply.model_validate_json('{"boot": "1", "weather": "fine"}') == Reply(boot="1")


def test_a_port_in_use_is_an_error(service: Service) -> None:
    with pytest.raises(StorageError, match="cannot listen"):
        serve(service.sessions, KEY, "127.0.0.1", service.port)
