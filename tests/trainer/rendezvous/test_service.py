"""The rendezvous service over HTTP: signatures, repetitions, restarts and bad requests."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from cluster.free_ports import free_ports

from fluxtrain.contract.process import read_places, write_places
from fluxtrain.errors import StorageError
from fluxtrain.rendezvous import http_server
from fluxtrain.rendezvous.client import Client
from fluxtrain.rendezvous.http_server import EVERY_ADDRESS
from fluxtrain.rendezvous.membership import Limits
from fluxtrain.rendezvous.messages import (
    MAX_BYTES,
    PATH,
    SIGNATURE_HEADER,
    Heartbeat,
    Key,
    RankReport,
    Reply,
    reply_signature,
    request_signature,
)
from fluxtrain.rendezvous.service import _MAX_WORLDS, Sessions, serve, serve_members

KEY = b"key of the job"


class Service:
    """A service on a free port of this machine; a restart keeps the port."""

    def __init__(self, limits: Limits, places: Mapping[str, str] | None = None) -> None:
        self.limits, self.places, self.port = limits, places or {}, 0
        self.clients: list[Client] = []
        self.start()

    def start(self) -> None:
        places = read_places(write_places(self.places))
        self.sessions = Sessions(self.limits, places=places)
        self.sessions._forms_after = self.sessions._membership.forms_after = 0
        self.server = serve(self.sessions, Key(KEY), "127.0.0.1", self.port)
        self.port = self.server.server_address[1]
        self.status = serve_members(self.sessions, "127.0.0.1", 0)

    def stop(self) -> None:
        for client in self.clients:  # the process would end with its connections
            client._connection.close()
        for server in (self.server, self.status):
            server.shutdown()
            server.server_close()

    def client(self, name: str, attempt: int = 1, key: bytes = KEY, node_name: str = "") -> Client:
        beat = Heartbeat(
            sequence=0, attempt=attempt, agent=name, node=name, node_name=node_name, joining=True
        )
        self.clients.append(Client("127.0.0.1", self.port, Key(key), beat))
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


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_agent_comes_by_ipv4_or_ipv6(host: str) -> None:
    sessions = Sessions(Limits(1, 1))
    server = serve(sessions, Key(KEY), EVERY_ADDRESS, 0)
    beat = Heartbeat(sequence=0, attempt=1, agent="a", node="a", joining=True)
    client = Client(host, server.server_address[1], Key(KEY), beat)
    try:
        assert client.exchange(), client.problem
    finally:
        client._connection.close()
        server.stop()


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


RANK = {"rank": 0, "phase": "step", "step": 7, "seconds_since_progress": 20.0, "generation": 1}


def test_the_progress_of_the_ranks_is_served_while_their_agents_are_heard(service: Service) -> None:
    now = [100.0]
    service.sessions.clock = lambda: now[0]
    clients = [service.client("uid-0.1"), service.client("uid-1.1")]
    for client in (*clients, clients[0]):
        reply_of(client)
    assert json.loads(service.get("/progress")[1]) == {"ranks": []}, "agents that report none"
    for number, client in enumerate(clients):
        frozen = {"frozen": True, "stack": "its state"} if number else {"step_seconds": 0.5}
        report = RankReport.model_validate({**RANK, "rank": number, **frozen})
        client.update(joining=False, generation=1, ranks=(report,), step=7)
        reply_of(client)
    now[0] += 5
    reply_of(clients[1])
    first, second = json.loads(service.get("/progress")[1])["ranks"]
    shared = {"phase": "step", "step": 7, "generation": 1}
    assert first == {
        **shared,
        "rank": 0,
        "pod": "uid-0",
        "secondsSinceProgress": 25.0,
        "stepSeconds": 0.5,
    }
    assert second == {
        **shared, "rank": 1, "pod": "uid-1", "secondsSinceProgress": 20.0, "frozen": True,
        "stack": "its state",
    }  # fmt: skip
    now[0] += 5
    assert reply_of(clients[1]).lost, "the first was not heard for ten seconds"
    assert [rank["rank"] for rank in json.loads(service.get("/progress")[1])["ranks"]] == [1]
    clients[1].update(joining=True)
    reply_of(clients[1])
    ranks = json.loads(service.get("/progress")[1])["ranks"]
    assert [rank["pod"] for rank in ranks] == ["uid-1"], "it is in the next generation"


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks",
    [
        None,
        7,
        "ranks",
        [7],
        [{}],
        [{**RANK, "rank": -1}],
        [{**RANK, "seconds_since_progress": -1}],
        [{**RANK, "seconds_since_progress": "NaN"}],
        [{**RANK, "stack": "a" * 161}],
        [RANK] * 65,
    ],
    ids=lambda ranks: repr(ranks)[:60],
)
def test_a_heartbeat_counts_without_its_ranks_if_they_are_not_valid(
    service: Service, ranks: object
) -> None:
    body = beat(boot=service.sessions.boot, joining=True, ranks=ranks)
    assert service.post(body, request_signature(KEY, body))[0] == 200
    assert service.sessions._membership._agents["a"].ranks == ()


def test_phases_and_fields_of_newer_ranks_are_passed_on(service: Service) -> None:
    service.sessions.limits = service.sessions._membership.limits = Limits(1, 1)
    client = service.client("uid-0.1")
    reply_of(client)
    body = beat(
        boot=service.sessions.boot, sequence=9, agent="uid-0.1", generation=1,
        ranks=[{**RANK, "phase": "dream", "weather": "fine"}],
    )  # fmt: skip
    assert service.post(body, request_signature(KEY, body))[0] == 200
    assert [r["phase"] for r in json.loads(service.get("/progress")[1])["ranks"]] == ["dream"]


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


@pytest.mark.parametrize(
    ("nodes", "world"),
    [
        ({"a": "n1"}, ["a"]),
        ({"a": "n1", "b": "n2"}, ["b", "a"]),
        ({"a": "n9", "b": "n1", "c": "n2", "d": "", "e": "n3"}, ["c", "e", "b", "a", "d"]),
    ],
    ids=["one node", "two racks", "two without a place"],
)
def test_agents_are_ordered_by_the_places_of_their_nodes(
    nodes: dict[str, str], world: list[str]
) -> None:
    places = {"n1": "rack-10", "n2": "rack-9", "n3": "rack-9"}
    service = Service(Limits(len(nodes), len(nodes)), places)
    try:
        for agent, node in nodes.items():
            reply_of(service.client(agent, node_name=node))
        assert json.loads(service.get("/members")[1])["world"] == world
        service.stop()
        service.places = {"n1": "rack-1"}  # labels have changed meanwhile
        service.start()
        for client, agent in zip(service.clients, nodes, strict=True):
            client.update(joining=False, generation=1, world=tuple(world))
            reply = reply_of(client)
            assert (reply.generation, reply.reform) == (1, False), agent
        assert json.loads(service.get("/members")[1])["world"] == world
    finally:
        service.stop()


def test_a_client_with_another_key_is_refused_and_changes_nothing(service: Service) -> None:
    assert not service.client("a", key=b"another").exchange()
    assert json.loads(service.get("/members")[1])["attempt"] == 0


def test_a_reply_that_is_not_signed_with_the_key_is_not_believed(service: Service) -> None:
    client = service.client("a")
    reply_of(client)
    client._key = Key(KEY)
    service.server.key = Key(b"another")
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "request_bytes",
    [
        b"POST /heartbeat HTTP/1.1\r\n\r\n",
        b"POST /heartbeat HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /heartbeat HTTP/1.1\r\nContent-Length: 2000000\r\n\r\n",
        b"POST /other HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /heartbeat HTTP/1.1\r\nContent-Length: 2\r\nFluxtrain-Signature: \xff\r\n\r\n{}",
        b"\x00\x01\x02\r\n\r\n",
        b"POST /heartbeat HTTP/1.1\r\nContent-Length: 2\r\n" + b"A: b\r\n" * 4000,
        b"POST /heartbeat HTTP/1.1\r\nContent-Length: 1000\r\n\r\n",
        b"POST /heartbeat HTTP/1.1\r\nContent-Length: 1000\r\nFluxtrain-Signature: a\r\n\r\n",
    ],
)
def test_a_bad_request_harms_nobody(service: Service, request_bytes: bytes) -> None:
    with socket.create_connection(("127.0.0.1", service.port), timeout=10) as connection:
        connection.sendall(request_bytes)
        answer = connection.recv(1000)
        assert any(status in answer for status in (b"400", b"403", b"431"))
    assert reply_of(service.client("a")).boot == service.sessions.boot


def test_fields_of_a_newer_version_are_ignored(service: Service) -> None:
    body = beat(boot=service.sessions.boot, weather="fine", joining=True)
    assert service.post(body, request_signature(KEY, body))[0] == 200
    assert "a" in service.sessions._membership._agents
    assert Reply.model_validate_json('{"boot": "1", "weather": "fine"}') == Reply(boot="1")


def test_a_port_in_use_is_an_error(service: Service) -> None:
    with pytest.raises(StorageError, match="cannot listen"):
        serve(service.sessions, Key(KEY), "127.0.0.1", service.port)


def test_a_first_line_that_does_not_end_is_not_read(service: Service) -> None:
    with socket.create_connection(("127.0.0.1", service.port), timeout=10) as connection:
        connection.sendall(b"GET /" + b"a" * 20_000)
        with suppress(ConnectionResetError):
            assert connection.recv(1000) == b""


def head(length: int, signature: str = "0" * 64) -> bytes:
    lines = f"POST {PATH} HTTP/1.1", f"Content-Length: {length}", f"{SIGNATURE_HEADER}: {signature}"
    return "\r\n".join((*lines, "", "")).encode()


def test_few_large_bodies_are_read_at_a_time_and_small_ones_always(service: Service) -> None:
    with ExitStack() as stack:
        for _ in range(_MAX_WORLDS):
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", service.port), 30))
            slow.sendall(head(MAX_BYTES))
        wait_for(lambda: not service.server.worlds._value)
        one = stack.enter_context(socket.create_connection(("127.0.0.1", service.port), 30))
        one.sendall(head(MAX_BYTES))
        assert b" 503 " in one.recv(1000)
        assert reply_of(service.client("a")).boot == service.sessions.boot
    wait_for(lambda: service.server.worlds._value == _MAX_WORLDS)


@pytest.mark.parametrize("num_nodes", [1, 500, 4096])
def test_worlds_of_all_sizes_are_learnt_and_tell_the_time_of_the_next_heartbeat(
    service: Service, num_nodes: int
) -> None:
    world = tuple(f"{number:0>60}" for number in range(num_nodes))
    client = service.client(world[0])
    client.update(joining=False, generation=3, world=world)
    assert reply_of(client).heartbeat_seconds == max(0.5, num_nodes / 1000)
    assert service.sessions._membership.world == world
    assert client._seconds == max(0.5, num_nodes / 1000)


def test_a_step_is_sent_with_the_next_heartbeat(service: Service) -> None:
    client = service.client("a")
    client.update(step=7)
    client.update(step=7, ranks=(RankReport.model_validate(RANK),))
    assert not client._changed.is_set()
    assert json.loads(client._next_body())["step"] == 7
    assert json.loads(client._next_body())["ranks"] == [RANK]
    client.update(step=8, joining=False)
    assert client._changed.is_set()


def test_connections_that_send_slowly_keep_nobody_out(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = service.status.server_address[1]
    with ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 30))
            for _ in range(100)
        ]
        for connection in idle:
            with suppress(OSError):
                connection.send(b"GET /members HTTP/1.1\r\n")
        assert service.get("/healthz") == (200, b"ok\n")
        assert len(service.status.connections) <= 8
        monkeypatch.setattr(http_server, "REQUEST_SECONDS", 0.5)
        slow = stack.enter_context(socket.create_connection(("127.0.0.1", port), 30))
        deadline = time.monotonic() + 60
        with suppress(ConnectionError):
            slow.sendall(b"GET /members HTTP/1.1\r\n")
            while time.monotonic() < deadline:  # never a second without a line
                slow.sendall(b"A: b\r\n")
                time.sleep(0.1)
        assert time.monotonic() < deadline
        wait_for(lambda: len(service.status.connections) == 0)


def test_the_service_ends_at_once_with_clients_that_do_not(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(KEY)
    ports = free_ports(2)
    options = ["--nodes=1:2", f"--key={key}", f"--port={ports[0]}", f"--members-port={ports[1]}"]
    process = subprocess.Popen([sys.executable, "-m", "fluxtrain.cli", "rendezvous", *options])
    with ExitStack() as stack:
        stack.callback(process.kill)
        wait_for(lambda: is_open(ports[1]))
        for port in (*ports[:1] * 100, *ports[1:] * 5):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), 30))
            client.sendall(head(1000) + b"{")
        started = time.monotonic()
        process.terminate()
        assert process.wait(60) == 0
        assert time.monotonic() - started < 5


def is_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def wait_for(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)
