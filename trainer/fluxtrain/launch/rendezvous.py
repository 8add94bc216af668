"""Where the agents of a job meet: a store in a process of its own, and torch's rendezvous over it.

The store's process holds nothing but torch's TCPStore. It runs in a pod of its own, so that losing any
training pod never takes the store along (design D4).
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
"""torchrun's name for a rendezvous that stays open when one meeting fails; see `register`."""
_RETRY_SECONDS = 1.0
_MEETING_SECONDS = 20
"""How long those who have met wait for each other's ranks, which is a matter of milliseconds."""


def hold_store(port: int, address: str = "0.0.0.0") -> None:
    """Hold the store at ``address:port`` until SIGTERM or SIGINT; StorageError where it cannot be had."""
    with stopping() as over:
        store = _open_store(port, address)
        over.wait()
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


def wait_for_store(endpoint: str, over: threading.Event) -> bool:
    """Wait until something listens at ``endpoint`` (host:port); return False where ``over`` came first."""
    host, _, port = endpoint.rpartition(":")
    while not over.is_set():
        try:
            with socket.create_connection((host, int(port)), timeout=_RETRY_SECONDS):
                return True
        except OSError:  # no name, no route or nobody there yet: all of them pass
            time.sleep(_RETRY_SECONDS)
    return False


@contextmanager
def stopping() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM and SIGINT set; the handlers before come back afterwards."""
    over = threading.Event()
    with handled(lambda *_: over.set(), signal.SIGTERM, signal.SIGINT):
        yield over


def register() -> None:
    """Make `BACKEND` known to torchrun."""
    rendezvous_handler_registry.register(BACKEND, _create)


class _OpenRendezvous(RendezvousHandler):
    """torch's own rendezvous, c10d, which a failed meeting does not close, and which nobody leaves unawares.

    A node may die after it has joined and before it has told its rank. The others wait for it in vain
    (``read_timeout``), fail, and torchrun would close the rendezvous for all as if the program had failed.

    An agent that cannot say for three seconds that it lives is given up by those who meet next. Torch's
    agent looks only for nodes that wait, so it would let its trainers go on beside the others'.
    """

    def __init__(self, c10d: DynamicRendezvousHandler) -> None:
        self._c10d = c10d

    def shutdown(self) -> bool:
        """Close the rendezvous, unless the store is why the agent ends: then it comes back."""
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
        """Return how many wait to be let in; that is one where we have been given up ourselves."""
        waiting = self._c10d.num_nodes_waiting()  # brings the state up to date
        met = self._c10d._this_node in self._c10d._state_holder.state.participants
        return waiting or int(not met)

    def get_run_id(self) -> str:
        return self._c10d.get_run_id()


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    parameters.config.setdefault("read_timeout", _MEETING_SECONDS)
    backend, store = create_backend(parameters)
    return _OpenRendezvous(create_handler(store, backend, parameters))
