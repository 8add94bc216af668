"""The rendezvous of a job's agents: a TCPStore in its own process, and torch's c10d rendezvous over it.

The store runs in its own pod, so that it survives the loss of any training pod.
"""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    create_handler,
)

from fluxtrain.errors import StorageError
from fluxtrain.signals import handled

BACKEND = "fluxtrain"
"""torchrun's name of the rendezvous that stays open after a failed round; see `register_backend`."""
_RETRY_SECONDS = 1.0
_READ_TIMEOUT_SECONDS = 20
"""How long agents that have joined wait for each other's ranks; usually milliseconds."""


def serve_store(port: int, address: str = "0.0.0.0") -> None:
    """Serve the store at ``address:port`` until SIGTERM or SIGINT; StorageError if it cannot listen."""
    with stop_event() as stop:
        store = _open_store(port, address)
        stop.wait()
        del store


def _open_store(port: int, address: str) -> TCPStore:
    try:
        return TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=30),
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise StorageError(
            f"the rendezvous store cannot listen on {address}:{port} ({reason})"
        ) from None


def wait_for_store(endpoint: str, stop: threading.Event) -> bool:
    """Wait for a listener at ``endpoint`` (host:port); return False if ``stop`` was set first."""
    host, _, port = endpoint.rpartition(":")
    while not stop.is_set():
        try:
            with socket.create_connection((host, int(port)), timeout=_RETRY_SECONDS):
                return True
        except OSError:  # unknown host, no route or connection refused: all are temporary
            time.sleep(_RETRY_SECONDS)
    return False


@contextmanager
def stop_event() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM and SIGINT set; afterwards restore the previous handlers."""
    event = threading.Event()
    with handled(lambda *_: event.set(), signal.SIGTERM, signal.SIGINT):
        yield event


def register_backend() -> None:
    """Register `BACKEND` with torchrun."""
    rendezvous_handler_registry.register(BACKEND, _create_handler)


class _OpenRendezvous(RendezvousHandler):
    """torch's c10d rendezvous, with two differences.

    A failed round does not close it. A node may be lost after it has joined and before it has published its
    rank: the others time out (``read_timeout``), and torchrun would close the rendezvous for all.

    An agent that the others have removed joins again. The next round removes an agent without a heartbeat
    for three seconds; torch's agent checks only for waiting nodes, so its trainers would continue in
    parallel with the others'.
    """

    def __init__(self, c10d: DynamicRendezvousHandler) -> None:
        self._c10d = c10d

    def shutdown(self) -> bool:
        """Close the rendezvous, unless the agent ends because the store is lost: then it joins again."""
        return isinstance(sys.exc_info()[1], DistError) or self._c10d.shutdown()

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return self._c10d.use_agent_store

    def next_rendezvous(self) -> RendezvousInfo:
        return self._c10d.next_rendezvous()

    def is_closed(self) -> bool:
        return self._c10d.is_closed()

    def set_closed(self) -> None:
        self._c10d.set_closed()

    def num_nodes_waiting(self) -> int:
        """Return the number of nodes that wait to join; 1 if this node itself was removed."""
        waiting = self._c10d.num_nodes_waiting()  # updates the state
        joined = self._c10d._this_node in self._c10d._state_holder.state.participants
        return waiting or int(not joined)

    def get_run_id(self) -> str:
        return self._c10d.get_run_id()


def _create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    parameters.config.setdefault("read_timeout", _READ_TIMEOUT_SECONDS)
    backend, store = create_backend(parameters)
    return _OpenRendezvous(create_handler(store, backend, parameters))
