"""The rendezvous of nodes without Kubernetes, at a real service: how waiting ends, and what is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from fluxtrain.errors import EXIT_OK, EXIT_STORAGE, NodesError, RefusedError
from fluxtrain.launch import several_nodes
from fluxtrain.launch.nodes import Nodes
from fluxtrain.launch.several_nodes import NodeRendezvous
from fluxtrain.rendezvous.client import Client
from fluxtrain.rendezvous.membership import Limits
from fluxtrain.rendezvous.messages import Heartbeat, Key
from fluxtrain.rendezvous.service import Admission, Sessions, serve

pytestmark = pytest.mark.slow

KEY = b"key of the run"
SETUP = "fluxtrain 1 with 1 processes and config abc"


class Node:
    """A node that joins in a thread."""

    def __init__(self, rendezvous: NodeRendezvous) -> None:
        self.rendezvous = rendezvous
        self.world: tuple[str, ...] | None = None
        self.error: Exception | None = None
        rendezvous.client.start()

    def join(self, seconds: float = 10) -> None:
        """Join a generation; wait for it, or for the error, at most ``seconds``."""
        self._thread = threading.Thread(target=self._join, daemon=True)
        self._thread.start()
        self._thread.join(seconds)

    def wait(self) -> None:
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _join(self) -> None:
        try:
            self.world = self.rendezvous._join()
        except (NodesError, RefusedError, RendezvousClosedError) as error:
            self.error = error


Start = Callable[..., Node]


@pytest.fixture
def sessions() -> Sessions:
    sessions = Sessions(Limits(2, 2), admission=Admission(SETUP))
    sessions._forms_after = sessions._membership.forms_after = 0
    return sessions


@pytest.fixture
def start(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Return a function that starts a node of a service of two nodes."""
    monkeypatch.setattr(several_nodes, "_REFUSED_SECONDS", 0.5)
    server = serve(sessions, Key(KEY), "127.0.0.1", 0)
    clients: list[Client] = []

    def start(
        rank: int | None = None, seconds: float = 10, key: bytes = KEY, setup: str = SETUP
    ) -> Node:
        name = f"node{len(clients)}"
        beat = Heartbeat(
            sequence=0,
            attempt=1,
            agent=name,
            node=name,
            node_name=name,
            node_rank=rank,
            setup=setup,
        )
        port = server.server_address[1]
        clients.append(Client("127.0.0.1", port, Key(key), beat))
        nodes = Nodes(2, 2, "head", port, rank, seconds)
        return Node(NodeRendezvous(clients[-1], name, "127.0.0.1", nodes))

    yield start
    for client in clients:
        client.stop()
    server.stop()


def two_that_train(start: Start) -> tuple[Node, Node]:
    first, second = start(), start()
    first.join(0.1)
    second.join()
    return first, second


def test_a_node_tells_how_many_have_come_and_gives_up(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    node = start(seconds=2)
    node.join()
    assert isinstance(node.error, NodesError)
    assert str(node.error) == "1 of 2 nodes have come to the rendezvous, for 2 s"
    assert "fluxtrain: 1 of 2 nodes have come to the rendezvous\n" in capsys.readouterr().err


def test_a_node_with_another_key_gets_no_answer(start: Start) -> None:
    node = start(seconds=2, key=b"another key")
    node.join()
    assert isinstance(node.error, NodesError)
    assert str(node.error).startswith("no answer of the rendezvous at head:")
    assert "status 403" in str(node.error)


def test_a_rank_that_is_taken_is_refused(start: Start) -> None:
    first = start(rank=1)
    first.join(0.5)
    second = start(rank=1)
    second.join()
    assert isinstance(second.error, RefusedError)
    assert str(second.error) == "--node-rank: got 1; node0 has this rank already"
    third = start(rank=0)
    third.join()
    first.wait()
    assert first.world == third.world == ("node0", "node2")


def test_a_node_that_starts_other_trainers_is_refused(start: Start) -> None:
    node = start(setup="fluxtrain 1 with 2 processes and config abc")
    node.join()
    assert isinstance(node.error, RefusedError)
    assert "this node starts fluxtrain 1 with 2 processes" in str(node.error)
    assert str(node.error).endswith(f"the node with the rendezvous {SETUP}")


def test_a_spare_node_waits_as_long_as_the_others_train(start: Start) -> None:
    first, second = two_that_train(start)
    spare = start(seconds=1)
    spare.join(3)
    assert spare.world is None
    assert spare.error is None
    first.rendezvous.client.stop(leaving=True)
    second.join()
    spare.wait()
    assert spare.world == second.world == ("node1", "node2")


@pytest.mark.parametrize("code", [EXIT_OK, EXIT_STORAGE])
def test_all_nodes_end_with_the_code_of_the_one_that_ends_the_run(start: Start, code: int) -> None:
    first, second = two_that_train(start)
    first.rendezvous.end_for_all(code)
    first.rendezvous.client.stop(leaving=True)
    second.join()
    assert isinstance(second.error, RendezvousClosedError)
    assert second.rendezvous.closed_code() == code


def test_an_ended_service_tells_its_code_to_nodes_that_join(
    start: Start, sessions: Sessions
) -> None:
    _, second = two_that_train(start)
    sessions.close(EXIT_STORAGE)
    sessions.close(EXIT_OK)
    deadline = time.monotonic() + 10
    second.join()
    assert time.monotonic() < deadline
    assert second.rendezvous.closed_code() == EXIT_STORAGE
