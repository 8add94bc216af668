"""The key of a job is deleted and drawn anew: agents and service, which see that at other times, go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from fluxtrain.rendezvous import messages as key_module
from fluxtrain.rendezvous.client import Client
from fluxtrain.rendezvous.membership import Limits
from fluxtrain.rendezvous.messages import Heartbeat, Key, request_signature
from fluxtrain.rendezvous.service import Sessions, serve

OLD, NEW = b"the first key", b"the second key"


@pytest.fixture(autouse=True)
def read_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_module, "_READ_SECONDS", 0.0)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(stack: ExitStack, file: Path) -> int:
    """Start a service whose pod mounts ``file``; return its port."""
    server = serve(Sessions(Limits(1, 2)), Key(file.read_bytes(), file), "127.0.0.1", 0)
    stack.callback(server.stop)
    return int(server.server_address[1])


def agent(stack: ExitStack, port: int, file: Path, name: str = "a") -> Client:
    beat = Heartbeat(sequence=0, attempt=1, agent=name, node=name, joining=True)
    client = Client("127.0.0.1", port, Key(file.read_bytes(), file), beat)
    stack.callback(client._connection.close)
    return client


def mount(folder: Path, pod: str, key: bytes) -> Path:
    (folder / pod).write_bytes(key)
    return folder / pod


def test_a_service_with_another_key_hears_an_agent_once_its_file_has_it(
    stack: ExitStack, tmp_path: Path
) -> None:
    port = start(stack, mount(tmp_path, "service", NEW))
    client = agent(stack, port, mount(tmp_path, "agent", OLD))
    assert not client.exchange()
    assert "403" in client.problem
    mount(tmp_path, "agent", NEW)
    assert [client.exchange(), client.exchange()] == [False, True]


def test_a_service_whose_file_gets_another_key_hears_agents_with_both(
    stack: ExitStack, tmp_path: Path
) -> None:
    file = mount(tmp_path, "service", OLD)
    port = start(stack, file)
    old = agent(stack, port, mount(tmp_path, "old", OLD), "old")
    new = agent(stack, port, mount(tmp_path, "new", NEW), "new")
    assert [old.exchange(), new.exchange()] == [True, False]
    mount(tmp_path, "service", NEW)
    assert [new.exchange(), old.exchange(), new.exchange()] == [True, True, True]


def test_a_wrong_signature_is_refused_and_reads_the_file_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = mount(tmp_path, "service", OLD)
    key = Key(OLD, file)
    assert key.of_request(b"body", request_signature(b"guessed", b"body")) is None
    monkeypatch.setattr(key_module, "_READ_SECONDS", 60.0)
    assert not key.refresh()
    mount(tmp_path, "service", NEW)
    assert not key.refresh(), "it was read just now"
    assert key.newest == OLD


@pytest.mark.parametrize("content", [None, b""])
def test_a_file_without_a_key_changes_nothing(content: bytes | None, tmp_path: Path) -> None:
    file = mount(tmp_path, "agent", OLD)
    key = Key(OLD, file)
    file.unlink() if content is None else file.write_bytes(content)
    assert not key.refresh()
    assert key.newest == OLD
