"""What pods that reach the ports of a rendezvous service may send: tables of attacks."""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from fluxtrain.rendezvous.messages import MAX_BYTES, PATH, SIGNATURE_HEADER, request_signature

ADDRESSES = [f"127.0.0.{number}" for number in range(2, 66)]
"""Of attackers; honest agents have 127.0.0.1."""
SECONDS = 0.5
"""How long an attack lasts at least."""


@dataclass
class Target:
    """A service under attack, and what an attacker has of it."""

    port: int
    members_port: int
    key: bytes
    """Only for requests that are called signed."""
    recorded: bytes
    """A signed request of an honest agent, head and body, that the attacker has recorded."""
    boot: str
    addresses: Iterator[str] = field(default_factory=lambda: itertools.cycle(ADDRESSES))

    def connect(self, port: int | None = None, address: str | None = None) -> socket.socket:
        """Return a connection from an address of an attacker."""
        source = (address or next(self.addresses), 0)
        return socket.create_connection(("127.0.0.1", port or self.port), 10, source)

    def send(self, data: bytes, port: int | None = None) -> str:
        """Send ``data`` on a new connection; return the first line of the answer, or how it ended."""
        try:
            with self.connect(port) as connection:
                connection.settimeout(1)
                with suppress(ConnectionError):
                    connection.sendall(data)
                answer = connection.recv(1 << 16)
        except TimeoutError:
            return "nothing"
        except OSError:
            return "closed"
        line = answer.splitlines()[0].decode("latin-1") if answer else ""
        return line.removeprefix("HTTP/1.1 ").removeprefix("HTTP/1.0 ")[:40] or "closed"


Attack = Callable[[Target], str]
"""Sends what the attack is, and returns what came back."""


def post(body: bytes, signature: str, path: str = PATH, **headers: str) -> bytes:
    """Return a request with ``body``."""
    lines = {"Content-Length": str(len(body)), SIGNATURE_HEADER: signature, **headers}
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in lines.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body


def beat(target: Target, **values: object) -> bytes:
    """Return the heartbeat of an agent that an attacker makes up."""
    names = {"agent": "attacker", "node": "attacker", "sequence": 10**9, "attempt": 1}
    return json.dumps({**names, "boot": target.boot, "joining": True, **values}).encode()


def forged(key: bytes, **values: object) -> Attack:
    """Return the attack with a heartbeat that is signed with another ``key``."""

    def attack(target: Target) -> str:
        body = beat(target, **values)
        return target.send(post(body, request_signature(key, body)))

    return attack


def signed(text: bytes) -> Attack:
    """Return the attack of a pod that has the key, with ``text`` as its message."""
    return lambda target: target.send(post(text, request_signature(target.key, text)))


def raw(data: bytes, members: bool = False) -> Attack:
    """Return the attack with ``data`` on a connection."""
    return lambda target: target.send(data, target.members_port if members else None)


def repeated(attack: Attack) -> Attack:
    """Return ``attack`` again and again."""

    def flood(target: Target) -> str:
        answers, end = dict[str, int](), time.monotonic() + SECONDS
        while time.monotonic() < end:
            answer = attack(target)
            answers[answer] = answers.get(answer, 0) + 1
        return ", ".join(f"{count} × {answer}" for answer, count in answers.items())

    return flood


def open_connections(count: int, sent: bytes, addresses: int, members: bool = False) -> Attack:
    """Return the attack with ``count`` connections that send ``sent`` and then nothing."""

    def attack(target: Target) -> str:
        opened = 0
        with ExitStack() as stack:
            for number in range(count):
                port = target.members_port if members else target.port
                with suppress(OSError):
                    address = ADDRESSES[number % addresses]
                    connection = stack.enter_context(target.connect(port, address))
                    connection.sendall(sent)
                    opened += 1
            time.sleep(SECONDS)
        return f"{opened} opened"

    return attack


def slowly(data: bytes, members: bool = False) -> Attack:
    """Return the attack with 100 connections that send ``data`` byte by byte."""

    def attack(target: Target) -> str:
        port = target.members_port if members else target.port
        with ExitStack() as stack:
            connections = [stack.enter_context(target.connect(port)) for _ in range(100)]
            for n in range(20):
                for connection in connections:
                    with suppress(OSError):
                        connection.send(data[n : n + 1])
                time.sleep(SECONDS / 20)
        return "20 bytes of each sent"

    return attack


def replay(target: Target) -> str:
    """Send a recorded request again."""
    return target.send(target.recorded)


def reset(target: Target) -> str:
    """Connect and reset."""
    connection = target.connect()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()
    return "reset"


SIGNATURE = "0" * 64
_EMPTY = post(b"", SIGNATURE)
_HEAD = b"POST /heartbeat HTTP/1.1\r\nFluxtrain-Signature: " + SIGNATURE.encode() + b"\r\n"
_WORLD = b'{"world": [' + b'"a",' * 200_000 + b'"a"]}'
WITHOUT_KEY: dict[str, Attack] = {
    "no signature": raw(post(b"{}", "")),
    "a signature of zeros": raw(post(b"{}", SIGNATURE)),
    "a signature of other characters": raw(post(b"{}", "é" * 64)),
    "signed with an empty key": forged(b""),
    "signed with another job's key": forged(b"key of another job"),
    "the name of another's agent, with another key": forged(b"x", agent="agent-0", leaving=True),
    "the end of the attempt, with another key": forged(b"x", closing=True, exit_code=1),
    "a later attempt, with another key": forged(b"x", attempt=9),
    "a recorded request, again and again": repeated(replay),
    "a recorded request with another path": lambda t: t.send(
        t.recorded.replace(b"heartbeat", b"x", 1)
    ),
    "a recorded request with a changed body": lambda t: t.send(t.recorded[:-2] + b" }"),
    "the head of a recorded request over another body": lambda t: t.send(
        t.recorded.partition(b"\r\n\r\n")[0] + b"\r\n\r\n{}"
    ),
    "a body of a gigabyte": raw(_HEAD + b"Content-Length: 999999999\r\n\r\n" + b"x" * 10_000_000),
    "a body of 10 GB": raw(_HEAD + b"Content-Length: 9999999999\r\n\r\n"),
    "a negative length": raw(_HEAD + b"Content-Length: -1\r\n\r\n"),
    "a length in Arabic digits": raw(_HEAD + b"Content-Length: \xd9\xa1\r\n\r\n"),
    "megabytes with a wrong signature": repeated(raw(post(b"x" * MAX_BYTES, SIGNATURE))),
    "chunks": raw(_HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"),
    "chunks with a length": raw(
        _HEAD
        + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
        + _EMPTY
    ),
    "two lengths": raw(_HEAD + b"Content-Length: 2\r\nContent-Length: 400\r\n\r\n{}" + _EMPTY),
    "1,000 requests in a pipeline": raw(post(b"{}", SIGNATURE) * 1000),
    "1,000 recorded requests in a pipeline": lambda t: t.send(t.recorded * 1000),
    "a request inside the body of another": lambda t: t.send(post(t.recorded, SIGNATURE)),
    "line feeds in a header": raw(post(b"{}", SIGNATURE, X="a\r\n b\n c")),
    "zero bytes in a header": raw(post(b"{}", SIGNATURE, X="\0" * 100)),
    "100,000 headers": raw(_HEAD + b"A: b\r\n" * 100_000),
    "a header of a megabyte": raw(_HEAD + b"A: " + b"b" * 1_000_000 + b"\r\n\r\n"),
    "a first line of a megabyte": raw(b"POST /" + b"a" * 1_000_000),
    "another method": raw(b"PATCH /heartbeat HTTP/1.1\r\n\r\n"),
    "HTTP/0.9": raw(b"GET /heartbeat\r\n"),
    "HTTP/9.9": raw(b"POST /heartbeat HTTP/9.9\r\n\r\n"),
    "TLS": raw(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 200),
    "a date in 1970": raw(post(b"{}", SIGNATURE, Date="Thu, 01 Jan 1970 00:00:00 GMT")),
    "waiting for 100 Continue": raw(_HEAD + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n"),
    "wrong signatures without pause": repeated(raw(post(b"{}", SIGNATURE))),
    "connections that are reset": repeated(reset),
    "10,000 half-open from one address": open_connections(10_000, b"", 1),
    "3,000 heads without an end": open_connections(3_000, _HEAD, 64),
    "100 senders of a byte at a time": slowly(_HEAD),
    "1,000 half-open to /members": open_connections(1_000, b"", 64, members=True),
    "100 slow readers of /members": slowly(b"GET /members HTTP/1.1\r\n", members=True),
    "/members without pause": repeated(raw(b"GET /members HTTP/1.0\r\n\r\n", members=True)),
    "1,000 requests for /progress in a pipeline": raw(
        b"GET /progress HTTP/1.1\r\n\r\n" * 1000, members=True
    ),
    "a heartbeat to /members": lambda t: t.send(t.recorded, t.members_port),
    "a file to /members": raw(b"GET /../../../etc/passwd HTTP/1.0\r\n\r\n", members=True),
}
"""Attacks of any pod that reaches the ports."""

WITH_KEY: dict[str, Attack] = {
    "JSON nested 100,000 deep": signed(b"[" * 100_000),
    "objects nested 10,000 deep": signed(b'{"a":' * 10_000 + b"1" + b"}" * 10_000),
    "a number of 100,000 digits": signed(b'{"sequence": ' + b"9" * 100_000 + b"}"),
    "numbers that are none": signed(b'{"sequence": NaN, "attempt": Infinity, "agent": "a"}'),
    "bytes that are no text": signed(b'{"agent": "\xff\xfe"}'),
    "a world of 200,000 agents": signed(_WORLD),
    "an earlier attempt": lambda t: forged(t.key, attempt=0)(t),
    "an earlier process of the service": lambda t: forged(t.key, boot="another")(t),
    "the sequence of the past for another's agent": lambda t: forged(
        t.key, agent="agent-0", sequence=0, leaving=True
    )(t),
    "ranks beyond all": lambda t: forged(
        t.key,
        joining=False,
        ranks=({"rank": 2**60, "phase": "step", "seconds_since_progress": -1},) * 200,
    )(t),
    "the name of a node that another has": lambda t: forged(t.key, node="node-0", joining=True)(t),
}
"""Attacks of a pod with the key of the job, such as one of its own, that do not stop it."""
